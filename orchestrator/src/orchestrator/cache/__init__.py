"""The KV cache system: any prefix, any worker, days later. `docs/kv_cache.md` describes it; `client` is the way in."""

"""The roles as processes: a front with entry and HTTP, a router, encoders, prefill and decode workers. docs/service.md."""

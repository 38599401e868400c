"""`fathom bench cache`: the KV cache system on recorded traces, and its parts."""

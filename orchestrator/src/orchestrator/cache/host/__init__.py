"""The host tier: blocks in shared memory, and who may use which slot."""

"""The store of cache blocks that all workers of a service share."""

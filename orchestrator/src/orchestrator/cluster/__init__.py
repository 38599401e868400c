"""Ranks that serve together: groups, their agreement on each step, their supervisor (docs/expert_parallel.md)."""

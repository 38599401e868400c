"""A request goes from one engine to another with all its state (docs/handoff.md)."""

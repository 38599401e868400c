"""Policies without tensors and without I/O."""

"""Blocks spread over twelve targets, any ten of which are enough."""

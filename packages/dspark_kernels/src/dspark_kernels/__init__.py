"""Sampling keyed by seed and position."""

__version__ = "0.1.0"

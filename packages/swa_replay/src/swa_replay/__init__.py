"""Sliding-window attention, window rings and bounded replay."""

__version__ = "0.1.0"

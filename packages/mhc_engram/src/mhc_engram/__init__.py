"""Hyper-connection mixing and Engram injection."""

__version__ = "0.1.0"

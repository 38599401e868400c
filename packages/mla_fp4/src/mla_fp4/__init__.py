"""Sparse latent attention over the FP4 cache, its indexer and its cache rows."""

__version__ = "0.1.0"

"""Sparse latent attention over the FP4 cache, its indexer and its cache rows."""

import kernel_core  # noqa: F401  (first: it imports torch, so that one OpenMP runtime is mapped)

__version__ = "0.1.0"

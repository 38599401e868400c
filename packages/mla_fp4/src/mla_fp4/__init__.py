"""Sparse latent attention over the FP4 cache, its indexer and its cache rows."""

from mla_fp4.ops.attention import sparse_attention
from mla_fp4.ops.compressor import compress
from mla_fp4.ops.indexer import index_scores, index_topk
from mla_fp4.ops.norm import norm_rope
from mla_fp4.ops.rows import kv_rows, store_index, store_main

__all__ = [
    "compress",
    "index_scores",
    "index_topk",
    "kv_rows",
    "norm_rope",
    "sparse_attention",
    "store_index",
    "store_main",
]
__version__ = "0.1.0"

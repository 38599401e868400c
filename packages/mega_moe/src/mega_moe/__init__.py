"""Router, fused experts with MXFP4 weights and dense products on packed weights."""

__version__ = "0.1.0"

"""Sampling, log-probabilities and token masks."""

from dspark_kernels.ops import apply_token_mask, sample, top_logprobs, uniform

__all__ = ["apply_token_mask", "sample", "top_logprobs", "uniform"]
__version__ = "0.1.0"

"""From logits to tokens: sampling, drafts, their schedule and their verification."""

from dspark_kernels.drafting import draft_step
from dspark_kernels.ops import apply_token_mask, sample, top_logprobs, uniform
from dspark_kernels.results import Proposals, Schedule, Verified, new_proposals, new_schedule, new_verified
from dspark_kernels.scheduling import confidence_head, schedule, survival
from dspark_kernels.verification import verify

__all__ = [
    "Proposals",
    "Schedule",
    "Verified",
    "apply_token_mask",
    "confidence_head",
    "draft_step",
    "new_proposals",
    "new_schedule",
    "new_verified",
    "sample",
    "schedule",
    "survival",
    "top_logprobs",
    "uniform",
    "verify",
]
__version__ = "0.1.0"

"""Settings of one engine rank, with the numbers that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.model.config import BLOCK_TOKENS, ModelConfig
from orchestrator.model.dense import DenseMode
from orchestrator.model.device import DeviceName


@dataclass(frozen=True)
class EngineConfig:
    """Attributes:
    max_num_seqs: requests that run at once (each has a slot of rings and tails).
    max_waiting: requests that may wait; one more is refused.
    num_blocks: blocks of 128 tokens in the global cache, beside the padding block.
    max_model_len: longest prompt plus output, in tokens; None takes what model and cache allow.
    max_step_tokens: tokens that one step computes at most.
    chunk_tokens: tokens of one prompt in a step at most.
    decoder_prefill: "bounded" computes decoder layers for the prompt's last tokens only, "exact" for all.
    quantised_caches: keep cache rows in the trained formats; False keeps float32 rows (for judging arithmetic).
    dense: "fixed" tile (a row's bits never depend on its batch) or "library" products on float32 copies.
    device: "cpu", or "cuda" for an NVIDIA GPU: where the model is loaded and the caches are.
    cuda_graphs: record decode steps as CUDA graphs; without meaning on a CPU.
    """

    max_num_seqs: int = 16
    max_waiting: int = 1024
    num_blocks: int = 512
    max_model_len: int | None = None
    max_step_tokens: int = 512
    chunk_tokens: int = 512
    decoder_prefill: str = "bounded"
    quantised_caches: bool = True
    dense: DenseMode = "fixed"
    device: DeviceName = "cpu"
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_waiting", "num_blocks", "max_step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed is at least 1")
        if self.decoder_prefill not in ("bounded", "exact"):
            raise ValueError(f"decoder_prefill: got {self.decoder_prefill!r}, allowed are 'bounded' and 'exact'")
        if self.dense not in ("fixed", "library"):
            raise ValueError(f"dense: got {self.dense!r}, allowed are 'fixed' and 'library'")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: got {self.device!r}, allowed are 'cpu' and 'cuda'")
        if self.max_step_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens: got {self.max_step_tokens}, allowed is at least max_num_seqs ({self.max_num_seqs}), "
                "so that every decoding request gets its token in each step"
            )

    def context(self, model: ModelConfig) -> int:
        """Longest request, in tokens."""
        limit = min(model.max_position_embeddings, self.num_blocks * BLOCK_TOKENS)
        if self.max_model_len is None:
            return limit
        if self.max_model_len > limit:
            raise ValueError(
                f"max_model_len: got {self.max_model_len}, allowed is at most {limit} (the model has "
                f"{model.max_position_embeddings} positions, the cache {self.num_blocks * BLOCK_TOKENS})"
            )
        return self.max_model_len

"""Settings of one engine rank, with the numbers that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.engine.prefix_plan import PREFIX_MODES, PrefixMode
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
    speculation: "off", a fixed number of drafts a step, or "scheduled": as many as pay for the step's time. Without
        meaning for a model without draft stages, where a number is refused.
    overlap: plan and start a decode step while the one before it runs; None does so on a GPU only.
    device: "cpu", or "cuda" for an NVIDIA GPU: where the model is loaded and the caches are.
    prefix_cache: whether prompts share the cache blocks of what they have in common: "off", "bounded" (windows behind a
        hit may be rebuilt from 128 tokens, so tokens depend a little on what is cached), "exact" (a hit only where the
        windows are there too: tokens as without a cache) or "canonical" (windows are rebuilt at fixed positions of
        every prompt: tokens never depend on what is cached).
    window_bytes: host memory for window snapshots of the prefix cache.
    prefix_high, prefix_low: shares of the cache blocks: once more than the first hold prefixes that nobody uses, the
        least recently used are given up until the second is left.
    cuda_graphs: record decode steps as CUDA graphs; without meaning on a CPU.
    image_bytes: host memory for embeddings of images: those of requests, and others that may come again.
    image_patches: patches of images that are encoded or wait for it at most; an idle encoder takes any image.
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
    speculation: str | int = "scheduled"
    overlap: bool | None = None
    device: DeviceName = "cpu"
    cuda_graphs: bool = True
    prefix_cache: PrefixMode = "off"
    window_bytes: int = 1 << 30
    prefix_high: float = 0.95
    prefix_low: float = 0.9
    image_bytes: int = 1 << 30
    image_patches: int = 1 << 17

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_waiting", "num_blocks", "max_step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed is at least 1")
        if self.decoder_prefill not in ("bounded", "exact"):
            raise ValueError(f"decoder_prefill: got {self.decoder_prefill!r}, allowed are 'bounded' and 'exact'")
        if self.prefix_cache not in PREFIX_MODES:
            allowed = ", ".join(map(repr, PREFIX_MODES))
            raise ValueError(f"prefix_cache: got {self.prefix_cache!r}, allowed are {allowed}")
        if self.prefix_cache in ("exact", "canonical") and self.decoder_prefill == "exact":
            raise ValueError(
                f"prefix_cache: got {self.prefix_cache!r} with decoder_prefill 'exact', allowed are 'off' and "
                "'bounded' then, since no snapshot holds the decoder's windows"
            )
        for name in ("window_bytes", "image_bytes", "image_patches"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed is at least 0")
        if not 0.0 <= self.prefix_low <= self.prefix_high <= 1.0:
            raise ValueError(
                f"prefix_high, prefix_low: got {self.prefix_high}, {self.prefix_low}, allowed are "
                "0 <= prefix_low <= prefix_high <= 1"
            )
        if self.dense not in ("fixed", "library"):
            raise ValueError(f"dense: got {self.dense!r}, allowed are 'fixed' and 'library'")
        number = type(self.speculation) is int and int(self.speculation) > 0
        if self.speculation not in ("off", "scheduled") and not number:
            raise ValueError(
                f"speculation: got {self.speculation!r}, allowed are 'off', 'scheduled' and a number of drafts above 0"
            )
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: got {self.device!r}, allowed are 'cpu' and 'cuda'")
        if self.max_step_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens: got {self.max_step_tokens}, allowed is at least max_num_seqs ({self.max_num_seqs}), "
                "so that every decoding request gets its token in each step"
            )

    def depth(self, model: ModelConfig) -> int:
        """Drafts a step at most; 0 is plain decoding."""
        if self.speculation == "off" or (self.speculation == "scheduled" and not model.num_nextn_predict_layers):
            return 0
        most = model.draft_length if model.num_nextn_predict_layers else 0
        if self.speculation == "scheduled":
            return most
        if int(self.speculation) > most:
            raise ValueError(f"speculation: got {self.speculation}, allowed is at most {most}, what the model drafts")
        return int(self.speculation)

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

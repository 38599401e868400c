"""From the tensors of a checkpoint to `ModelWeights`: experts stacked, norms widened, everything else as stored."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from orchestrator.model.checkpoint.checks import check_tensors
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.checkpoint.vision_weights import VISION_NAMES
from orchestrator.model.config import ModelConfig
from orchestrator.model.engram_tables import check_engram_rows
from orchestrator.model.weights import (
    Compressor,
    Drafter,
    Engram,
    Experts,
    ExpertsOf,
    HyperConnection,
    Indexer,
    Layer,
    Linear,
    ModelWeights,
)

NAN_SCALE = 255
"""The E8M0 byte without a value; a scale that holds it makes its whole block NaN."""


def load_weights(path: str | Path, experts: ExpertsOf = ("layers", "mtp"), vision: bool = True) -> ModelWeights:
    """Read a checkpoint folder. Engram tables stay in their files (mapped read-only), all else is read to memory.

    Routed experts of blocks not named in `experts` are checked for dtype and shape, left in their files, and come
    without rows; so is the image encoder without `vision`. Raises `CheckpointError` naming the file or tensor, what was
    found, what is expected and what to do.
    """
    checkpoint = Checkpoint(path)
    config = checkpoint.config
    check_tensors(config, checkpoint.entries, checkpoint.folder)
    try:
        check_engram_rows(config)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}/config.json: {error}") from error
    take = _Taker(checkpoint, experts)
    weights = ModelWeights(
        config=config,
        embed=take.plain("embed.weight"),
        head=take.plain("head.weight"),
        norm=take.float32("norm.weight"),
        layers=[_backbone_layer(take, config, layer) for layer in range(config.num_hidden_layers)],
        drafter=_drafter(take, config) if config.num_nextn_predict_layers else None,
    )
    if config.vision is not None:
        weights.image_start = take.float32("image_start")
        weights.image_end = take.float32("image_end")
        weights.image_newline = take.float32("image_newline")
        names = [name for name in checkpoint.entries if name.startswith(VISION_NAMES)]
        if vision:
            weights.vision = {name: take.plain(name) for name in names}
        else:
            take.leave(names)
    take.check_all_taken()
    weights.bytes_read = checkpoint.bytes_read
    return weights


class _Taker:
    """Reads tensors and remembers which, so that none is left without a place in the model."""

    def __init__(self, checkpoint: Checkpoint, experts: ExpertsOf) -> None:
        self.checkpoint, self.experts = checkpoint, experts
        self.left = set(checkpoint.entries)

    def plain(self, name: str) -> torch.Tensor:
        self.left.discard(name)
        return self.checkpoint.read(name)

    def leave(self, names: Iterable[str]) -> None:
        """They are not wanted here."""
        self.left.difference_update(names)

    def float32(self, name: str) -> torch.Tensor:
        return self.plain(name).to(torch.float32)

    def scale(self, name: str) -> torch.Tensor:
        scale = self.plain(name)
        self._check_scale(name, scale)
        return scale

    def _check_scale(self, name: str, scale: torch.Tensor) -> None:
        if bool((scale == NAN_SCALE).any()):
            at = (scale == NAN_SCALE).nonzero()[0].tolist()
            raise CheckpointError(
                f"{self.checkpoint.file_of(name)}: {name}: byte {NAN_SCALE} (NaN) at {at}; the scale is damaged, "
                "download the file again"
            )

    def mapped(self, name: str) -> torch.Tensor:
        self.left.discard(name)
        return self.checkpoint.map(name)

    def linear(self, name: str) -> Linear:
        return Linear(self.plain(f"{name}.weight"), self.scale(f"{name}.scale"))

    def stacked(self, prefix: str, count: int, parts: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and scales of `count` experts, the rows of `parts` one after the other within each."""
        return self._stack(prefix, count, parts, "weight"), self._stack(prefix, count, parts, "scale")

    def _stack(self, prefix: str, count: int, parts: tuple[str, ...], kind: str) -> torch.Tensor:
        shapes = [self.checkpoint.entries[f"{prefix}.0.{part}.{kind}"].shape for part in parts]
        rows = [shape[0] for shape in shapes]
        if prefix.split(".")[0] not in self.experts:
            self.left -= {f"{prefix}.{expert}.{part}.{kind}" for expert in range(count) for part in parts}
            count = 0
        out = torch.empty(count, sum(rows), shapes[0][1], dtype=torch.uint8)
        for expert, slot in enumerate(out):
            for part, piece in zip(parts, slot.split(rows), strict=True):
                name = f"{prefix}.{expert}.{part}.{kind}"
                self.left.discard(name)
                self.checkpoint.read_into(name, piece)
        if kind == "scale" and bool((out == NAN_SCALE).any()):
            for expert, slot in enumerate(out):
                for part, piece in zip(parts, slot.split(rows), strict=True):
                    self._check_scale(f"{prefix}.{expert}.{part}.{kind}", piece)
        return out

    def check_all_taken(self) -> None:
        if self.left:
            raise CheckpointError(f"{self.checkpoint.folder}: {sorted(self.left)[0]} has no place in the model")


def _backbone_layer(take: _Taker, config: ModelConfig, layer: int) -> Layer:
    prefix = f"layers.{layer}"
    out = _block(take, prefix, config.n_routed_experts)
    if config.is_full(layer):
        gated = config.ratio(layer) > 1
        out.compressor = Compressor(
            wkv=take.plain(f"{prefix}.attn.compressor.wkv.weight"),
            wgate=take.plain(f"{prefix}.attn.compressor.wgate.weight") if gated else None,
            norm=take.float32(f"{prefix}.attn.compressor.norm.weight"),
        )
    if layer in config.index_source_layer_ids:
        index = f"{prefix}.attn.indexer"
        out.indexer = Indexer(
            wq_b=take.linear(f"{index}.wq_b"),
            weights_proj=take.plain(f"{index}.weights_proj.weight"),
            wk=take.plain(f"{index}.wk.weight") if config.is_full(layer) else None,
            k_norm=take.float32(f"{index}.k_norm.weight") if config.is_full(layer) else None,
        )
    if layer in config.engram_layer_ids:
        engram = f"{prefix}.engram"
        out.engram = Engram(
            table=take.mapped(f"{engram}.embed.weight"),
            table_scale=take.mapped(f"{engram}.embed.scale"),
            qk_weight=take.float32(f"{engram}.q_weight") * take.float32(f"{engram}.k_weight"),
            wkv=take.linear(f"{engram}.wkv"),
        )
    return out


def _block(take: _Taker, prefix: str, experts: int) -> Layer:
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    return Layer(
        attn_norm=take.float32(f"{prefix}.attn_norm.weight"),
        ffn_norm=take.float32(f"{prefix}.ffn_norm.weight"),
        wq_a=take.linear(f"{attn}.wq_a"),
        q_norm=take.float32(f"{attn}.q_norm.weight"),
        wq_b=take.linear(f"{attn}.wq_b"),
        wkv=take.linear(f"{attn}.wkv"),
        kv_norm=take.float32(f"{attn}.kv_norm.weight"),
        wo_a=take.linear(f"{attn}.wo_a"),
        wo_b=take.linear(f"{attn}.wo_b"),
        sink=take.plain(f"{attn}.attn_sink"),
        gate=take.plain(f"{ffn}.gate.weight"),
        gate_bias=take.plain(f"{ffn}.gate.bias"),
        gate_bias_vl=take.plain(f"{ffn}.gate.bias_vl"),
        experts=_experts(take, ffn, experts),
        hc_attn=_hyper_connection(take, f"{prefix}.hc_attn"),
        hc_ffn=_hyper_connection(take, f"{prefix}.hc_ffn"),
    )


def _experts(take: _Taker, ffn: str, count: int) -> Experts:
    w13, s13 = take.stacked(f"{ffn}.experts", count, ("w1", "w3"))
    w2, s2 = take.stacked(f"{ffn}.experts", count, ("w2",))
    gate, down, up = (take.linear(f"{ffn}.shared_experts.{part}") for part in ("w1", "w2", "w3"))
    assert gate.scale is not None and up.scale is not None and down.scale is not None
    return Experts(
        w13=w13,
        s13=s13,
        w2=w2,
        s2=s2,
        shared_w13=_join(gate.weight, up.weight),
        shared_s13=torch.cat([gate.scale, up.scale]),
        shared_w2=down.weight,
        shared_s2=down.scale,
    )


def _join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rows of two FP8 matrices, joined as bytes."""
    return torch.cat([first.view(torch.uint8), second.view(torch.uint8)]).view(first.dtype)


def _hyper_connection(take: _Taker, prefix: str) -> HyperConnection:
    return HyperConnection(take.plain(f"{prefix}_fn"), take.plain(f"{prefix}_base"), take.plain(f"{prefix}_scale"))


def _drafter(take: _Taker, config: ModelConfig) -> Drafter:
    stages = config.num_nextn_predict_layers
    last = f"mtp.{stages - 1}"
    return Drafter(
        stages=[_block(take, f"mtp.{stage}", config.dspark_n_routed_experts) for stage in range(stages)],
        main_proj=take.linear("mtp.0.main_proj"),
        main_norm=take.float32("mtp.0.main_norm.weight"),
        norm=take.float32(f"{last}.norm.weight"),
        markov_embed=take.plain(f"{last}.markov_head.embed.weight"),
        markov_head=take.plain(f"{last}.markov_head.head.weight"),
        confidence=take.float32(f"{last}.confidence_head.proj.weight").flatten(),
    )

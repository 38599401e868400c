"""Trainable values under the names of the checkpoint, how they start, and how they are updated.

Routed experts of a layer are one tensor, `layers.0.ffn.experts.w1` [E, inter, d]; everything else has the name and
the shape that `checkpoint.specs.stored_weights` gives it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import nn

from orchestrator.model.config import ModelConfig

# Of a start value: standard deviation, by name; the first match wins. Matrices go by their number of inputs.
_EMBEDDING, _TABLE = 0.3, 0.3


class Entry:
    """One tensor: name, storage of the checkpoint, shape (experts stacked)."""

    def __init__(self, name: str, storage: str, shape: tuple[int, ...]) -> None:
        self.name, self.storage, self.shape = name, storage, shape


def entries(config: ModelConfig, *, drafter: bool) -> Iterator[Entry]:
    """The text backbone's tensors, or those of the draft stages (`mtp.*`)."""
    from orchestrator.model.checkpoint.specs import stored_weights

    for stored in stored_weights(config):
        if stored.name.startswith(("vision.", "aligner.", "image_")) or stored.name.startswith("mtp.") != drafter:
            continue
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(w\d)", stored.name)
        if expert is None:
            yield Entry(stored.name, stored.storage, stored.shape)
        elif expert[2] == "0":
            count = config.dspark_n_routed_experts if drafter else config.n_routed_experts
            yield Entry(f"{expert[1]}.{expert[3]}", stored.storage, (count, *stored.shape))


def is_buffer(name: str) -> bool:
    """Router biases are moved by counts of tokens, not by gradients."""
    return name.endswith(("gate.bias", "gate.bias_vl"))


def start_value(entry: Entry, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    """The value training starts from."""
    name, shape = entry.name, entry.shape
    n, depth = config.hc_mult, 2 * config.num_hidden_layers

    def normal(deviation: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * deviation

    if name.endswith(("norm.weight", "engram.q_weight", "engram.k_weight")):
        return torch.ones(shape)
    if is_buffer(name) or name.endswith(("attn_sink", "markov_head.head.weight", "confidence_head.proj.weight")):
        return torch.zeros(shape)
    if name.endswith("_base"):
        # Each half reads one stream (they take turns), writes to all alike, and leaves the streams nearly as they are.
        layer, half = int(name.split(".")[1]), "ffn" in name
        base = torch.zeros(shape)
        base[:n] = -2.0
        base[(2 * layer + half) % n] = 2.0
        base[n : 2 * n] = torch.randn(n, generator=generator) * 0.3
        base[2 * n :] = torch.where(torch.eye(n, dtype=torch.bool), 3.0, -1.0).flatten()
        return base
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    if name.endswith(("embed.weight", "markov_head.embed.weight")):
        return normal(_EMBEDDING)
    if name.endswith("engram.embed"):
        return normal(_TABLE)
    deviation = shape[-1] ** -0.5
    if name.endswith(("wo_b", ".w2")):
        return normal(deviation / math.sqrt(depth))
    if name in ("head.weight",) or name.endswith("gate.weight"):
        return normal(0.3 * deviation)
    return normal(deviation)


def matrix_view(entry: Entry, config: ModelConfig) -> tuple[int, int, int] | None:
    """(count, rows, columns) where Muon updates the tensor as that many separate matrices; None for AdamW."""
    name, shape = entry.name, entry.shape
    if name.endswith((".experts.w1", ".experts.w2", ".experts.w3")):
        return shape  # type: ignore[return-value]
    if len(shape) != 2 or not re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123]|main_proj|wk|wkv\.weight|wgate\.weight|"
                                        r"wk\.weight)$", name):  # fmt: skip
        return None
    rows, columns = shape
    if name.endswith("indexer.wq_b"):
        return config.index_n_heads, config.index_head_dim, columns
    if name.endswith("attn.wq_b"):
        return config.num_attention_heads, config.head_dim, columns
    if name.endswith("attn.wo_a"):
        return config.o_groups, config.o_lora_rank, columns
    if name.endswith("engram.wkv"):
        return config.hc_mult + 1, config.hidden_size, columns
    return 1, rows, columns


def lr_scale(name: str) -> float:
    """AdamW learning rate of a tensor relative to Muon's."""
    if name.endswith("engram.embed"):
        return 5.0
    if re.search(r"_(fn|base|scale)$", name):
        return 0.5
    return 1.0


def register(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Put values into `module` as parameters or buffers; a module's names cannot hold dots, so they become slashes."""
    for name, value in values.items():
        key = name.replace(".", "/")
        if is_buffer(name):
            module.register_buffer(key, value)
        else:
            module.register_parameter(key, nn.Parameter(value))


def registered(module: nn.Module) -> dict[str, torch.Tensor]:
    """The inverse of `register`."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {key.replace("/", "."): value for key, value in own if "/" in key}

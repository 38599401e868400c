"""What the training loop needs of phases, models, optimizers and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Phase(Protocol):
    """What the loop reads of a phase; the model may read more."""

    @property
    def until(self) -> float: ...
    @property
    def length(self) -> int: ...
    @property
    def batch(self) -> int: ...


class Trainable(Protocol):
    """A model that can be trained; names are those of the checkpoint, buffers among them."""

    def tensors(self) -> dict[str, torch.Tensor]: ...
    def loss(self, tokens: torch.Tensor, phase: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...
    def after_step(self, progress: float) -> None: ...


class Updates(Protocol):
    """An optimizer, as in `orchestrator.train.optimizer`."""

    skipped: torch.Tensor

    def step(self, lr: float) -> torch.Tensor: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, torch.Tensor]: ...
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None: ...


class Source(Protocol):
    """Batches, as in `orchestrator.train.batches`."""

    def get(self, step: int, batch: int, length: int) -> torch.Tensor: ...

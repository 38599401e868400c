"""Muon for matrices, AdamW for everything else, without a host synchronisation in a step.

Muon keeps a Nesterov momentum of the gradient and moves along the nearest matrix with singular values of about 1. All
matrices of one shape, over all parameters, go through the same batched products (`muon`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from orchestrator.train.muon import buckets, families, orthogonalised

CLIP = 1.0
"""Largest norm of all gradients together; larger ones are scaled down to it."""


class Tensors(Protocol):
    """What the optimizer needs of a model."""

    def tensors(self) -> dict[str, torch.Tensor]: ...
    def matrices(self) -> dict[str, tuple[int, int, int]]: ...
    def lr_scales(self) -> dict[str, float]: ...


class Optimizer:
    """One step over all parameters of `model.tensors()`; tensors without gradient (buffers) are left alone.

    `rms` is the root mean square of a Muon update before the learning rate, so that both halves take the same one.
    `eps` is AdamW's, and the floor of the norm that Newton-Schulz divides by. A step with a gradient that is not
    finite changes nothing but `skipped`.
    """

    def __init__(
        self,
        model: Tensors,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        rms: float = 0.18,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-12,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr: got {lr}, allowed is a number above 0")
        self.lr, self.momentum, self.weight_decay, self.rms, self.eps = lr, momentum, weight_decay, rms, eps
        self.parameters = {name: value for name, value in model.tensors().items() if value.requires_grad}
        matrices = model.matrices()
        unknown = sorted(set(matrices) - set(self.parameters))
        if unknown:
            raise ValueError(f"matrices: got {unknown[0]}, allowed is a name of tensors() with a gradient")
        self._buckets = buckets(self.parameters, matrices)
        self._rest = [name for name in self.parameters if name not in matrices]
        groups = _adamw_groups(self.parameters, self._rest, model.lr_scales(), weight_decay)
        self._adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True) if groups else None
        device = next(iter(self.parameters.values())).device
        #: Steps left out because a gradient was not finite, int64 [].
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self, lr: float | None = None) -> torch.Tensor:
        """Update from the gradients that are there; returns their norm before clipping, float32 [], on the device."""
        lr = self.lr if lr is None else lr
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            raise ValueError("step: got no gradients, allowed is a call after backward()")
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        good = torch.isfinite(norm)
        shrink = torch.where(good, CLIP / norm.clamp(min=CLIP), 1.0)
        self.skipped += ~good
        self._muon(lr, good, shrink)
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr * group["scale"]
            # The fused kernel divides by grad_scale and does nothing where found_inf is 1, both read on the device.
            self._adamw.grad_scale = 1 / shrink  # type: ignore[attr-defined]
            self._adamw.found_inf = (~good).to(torch.float32)  # type: ignore[attr-defined]
            self._adamw.step()
        return norm

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything that a later step depends on, as tensors by name."""
        state = {"skipped": self.skipped}
        for bucket in self._buckets:
            state |= {f"momentum/{name}": part for name, part in zip(bucket.names, bucket.parts(), strict=True)}
        for name in self._rest:
            moments = self._adamw.state.get(self.parameters[name], {}) if self._adamw else {}
            state |= {f"adamw/{name}/{key}": value for key, value in moments.items()}
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state_dict`. Raises `ValueError` if it belongs to other parameters."""
        wanted = {f"momentum/{name}" for bucket in self._buckets for name in bucket.names} | {"skipped"}
        found = {name for name in state if not name.startswith("adamw/")}
        if wanted != found:
            raise ValueError(f"state: got other names ({sorted(wanted ^ found)[0]}), allowed is that of this model")
        loaded: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            if key.startswith("adamw/"):
                _, name, moment = key.split("/")
                loaded.setdefault(name, {})[moment] = value
        if surplus := sorted(set(loaded) - set(self._rest)):
            raise ValueError(f"state: got {surplus[0]}, allowed is a parameter that AdamW updates")
        for bucket in self._buckets:
            for name, part in zip(bucket.names, bucket.parts(), strict=True):
                part.copy_(_shaped(name, state[f"momentum/{name}"], part))
        for name, moments in loaded.items():
            parameter = self.parameters[name]
            assert self._adamw is not None
            self._adamw.state[parameter] = {
                key: (value if key == "step" else _shaped(name, value, parameter)).to(parameter.device, copy=True)
                for key, value in moments.items()
            }
        self.skipped.copy_(state["skipped"])

    def _muon(self, lr: float, good: torch.Tensor, shrink: torch.Tensor) -> None:
        keep = torch.where(good, self.momentum, 1.0)
        fed = torch.where(good, 1 - self.momentum, 0.0)
        for family in families(self._buckets):
            directions = []
            for bucket in family:
                gradient = bucket.gradient() * shrink
                gradient = gradient.where(good, 0.0)  # NaN times 0 is NaN
                bucket.average.mul_(keep).add_(gradient * fed)
                direction = torch.lerp(gradient, bucket.average, self.momentum)
                directions.append(direction.mT if bucket.rows > bucket.columns else direction)
            flat = orthogonalised(torch.cat(directions), self.eps)
            scale = good * (-lr * self.rms * math.sqrt(max(family[0].rows, family[0].columns)))
            for bucket, update in zip(family, flat.split([b.count for b in family]), strict=True):
                update = update.mT if bucket.rows > bucket.columns else update
                update = (update * scale).contiguous()
                torch._foreach_mul_(bucket.parameters, 1 - good * (lr * self.weight_decay))
                torch._foreach_add_(bucket.parameters, bucket.split(update))


def _adamw_groups(
    parameters: dict[str, torch.Tensor], names: list[str], scales: Mapping[str, float], weight_decay: float
) -> list[dict]:
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name in names:
        decay = weight_decay if _decays(name, parameters[name]) else 0.0
        groups.setdefault((scales.get(name, 1.0), decay), []).append(parameters[name])
    return [{"params": params, "scale": s, "weight_decay": d} for (s, d), params in groups.items()]


def _decays(name: str, parameter: torch.Tensor) -> bool:
    """Not vectors, biases, embedding tables, or Engram's q and k weights, which are norm gains a stream."""
    return parameter.dim() > 1 and not any(
        part in ("embed", "bias", "q_weight", "k_weight") for part in name.split(".")
    )


def _shaped(name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if value.shape != like.shape:
        raise ValueError(f"state: got shape {list(value.shape)} for {name}, allowed is {list(like.shape)}")
    return value

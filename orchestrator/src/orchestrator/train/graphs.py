"""A training step as one CUDA graph: its thousands of small launches cost the host nothing when it is replayed."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

_WARM_UP = 2


class CapturedGradients:
    """Computes loss and gradients of batches like the first; a phase with other shapes or switches is captured anew.

    Gradients lie in memory of the graph and are overwritten by each call. A model that is captured must not read
    anything from the host in its pass: no generators, no Python state that changes with the step. A graph that does
    not give the loss and the gradients of the plain pass is refused, and one that cannot be captured is reported; then
    the plain pass is used.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._plain = model, False
        self._phase: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, tokens: torch.Tensor, phase: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, metrics), with the gradients in the parameters' `grad`."""
        if phase != self._phase and not self._plain:
            began, load = time.monotonic(), self._model.load.clone()
            try:
                self._capture(tokens, phase, step)
                print(f"captured {phase} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch without CUDA
                self._plain, self._graph = True, None
                print(f"going on without a CUDA graph: {error}", file=sys.stderr, flush=True)
            self._model.load.copy_(load)  # what passes before the first real one have counted
        if self._graph is None:
            for parameter in self._parameters():
                parameter.grad = None
            loss, metrics = self._model.loss(tokens, phase, step)
            loss.backward()
            return loss.detach(), metrics
        self._tokens.copy_(tokens)
        self._graph.replay()
        for parameter, grad in self._gradients:
            parameter.grad = grad
        return self._loss.clone(), {name: value.clone() for name, value in self._metrics.items()}

    def _capture(self, tokens: torch.Tensor, phase: Any, step: int) -> None:
        self._graph, self._gradients = None, []
        for name in ("_loss", "_metrics", "_tokens"):  # memory of the last graph
            vars(self).pop(name, None)
        parameters = self._parameters()

        def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            for parameter in parameters:
                parameter.grad = None
            loss, metrics = self._model.loss(self._tokens, phase, step)
            loss.backward()
            return loss.detach(), metrics

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._tokens = tokens.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):  # compiles what is compiled
                loss, _ = run()
            expected = (float(loss), _norm(parameters))
        torch.cuda.current_stream().wait_stream(side)
        for parameter in parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss, self._metrics = run()
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        self._graph, self._phase = graph, phase
        graph.replay()
        for parameter, grad in self._gradients:
            parameter.grad = grad
        found = (float(self._loss), _norm(parameters))
        if any(abs(a - b) > 0.01 * abs(a) for a, b in zip(expected, found, strict=True)):
            self._graph = None
            raise RuntimeError(f"loss and gradient norm: got {found} from the graph, {expected} from the plain pass")

    def _parameters(self) -> list[torch.Tensor]:
        return [p for p in self._model.tensors().values() if p.requires_grad]


def _norm(parameters: list[torch.Tensor]) -> float:
    return float(torch.stack([p.grad.float().norm() for p in parameters if p.grad is not None]).norm())

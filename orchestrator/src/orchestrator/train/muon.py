"""Matrices of many parameters, stacked by shape, and their Newton-Schulz iteration in one chain of batched products."""

from __future__ import annotations

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Bucket:
    """Parameters made of [rows, columns] matrices, and their momentum stacked: float32 [count, rows, columns]."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.names: list[str] = []
        self.parameters: list[torch.Tensor] = []
        self.counts: list[int] = []
        self.average = torch.empty(0)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def finish(self) -> None:
        self.average = torch.zeros(self.count, self.rows, self.columns, device=self.parameters[0].device)

    def gradient(self) -> torch.Tensor:
        """Gradients stacked like the momentum; zeros for a parameter that had none in this step."""
        values = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return torch.cat([value.reshape(-1, self.rows, self.columns) for value in values])

    def split(self, stacked: torch.Tensor) -> list[torch.Tensor]:
        """Pieces of a contiguous stack in the parameters' shapes, as views."""
        pairs = zip(stacked.split(self.counts), self.parameters, strict=True)
        return [piece.view(parameter.shape) for piece, parameter in pairs]

    def parts(self) -> list[torch.Tensor]:
        return self.split(self.average)


def orthogonalised(matrices: torch.Tensor, eps: float = 1e-12) -> torch.Tensor:
    """[count, rows, columns], rows <= columns: each one's singular values moved to about 1 (0.7 to 1.2), float32.

    Computed in bfloat16 on CUDA, which the iteration tolerates, and in float32 elsewhere.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(torch.float32)


def buckets(parameters: dict[str, torch.Tensor], matrices: dict[str, tuple[int, int, int]]) -> list[Bucket]:
    """Parameters by the shape of their matrices. Raises `ValueError` for a view that a parameter does not have."""
    found: dict[tuple[int, int], Bucket] = {}
    for name, (count, rows, columns) in matrices.items():
        parameter = parameters[name]
        if count * rows * columns != parameter.numel():
            raise ValueError(
                f"matrices: got {count} x {rows} x {columns} for {name}, allowed is a view of {list(parameter.shape)}"
            )
        bucket = found.setdefault((rows, columns), Bucket(rows, columns))
        bucket.names.append(name)
        bucket.parameters.append(parameter)
        bucket.counts.append(count)
    for bucket in found.values():
        bucket.finish()
    return list(found.values())


def families(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets that share a shape up to transposition."""
    found: dict[tuple[int, int], list[Bucket]] = {}
    for bucket in buckets:
        shape = (min(bucket.rows, bucket.columns), max(bucket.rows, bucket.columns))
        found.setdefault(shape, []).append(bucket)
    return list(found.values())

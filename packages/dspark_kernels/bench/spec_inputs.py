"""Inputs of the speculative ops, on any device: confidences like measured ones, drafts near the target."""

from __future__ import annotations

from typing import Any

import torch

from dspark_kernels import Proposals, draft_step, new_proposals

SPREAD = 3.0  # of the logits: about a thousand tokens hold 95 % of the mass
SETTINGS = {  # temperature, top_p, top_k
    "greedy": (0.0, 1.0, 0),
    "plain": (1.0, 1.0, 0),
    "top_p": (1.0, 0.95, 0),
    "top_k": (1.0, 1.0, 50),
}


def schedule_inputs(R: int, G: int, device: str = "cpu") -> dict[str, Any]:
    """R requests of G drafts, of which 3.2 are verified on average; room for all that this takes."""
    g = torch.Generator().manual_seed(R)
    budget = R * 16 // 5
    made = {
        "confidence": 0.6 + 0.4 * torch.rand(R, G, generator=g),
        "tokens": torch.randint(0, 129_280, (R, 1 + G), generator=g),
        "starts": torch.randint(0, 2**20, (R,), generator=g),
        "limits": torch.full((R,), G, dtype=torch.int32),
        "slots": torch.randperm(R, generator=g).int(),
        "budget": torch.tensor([budget], dtype=torch.int32),
    }
    return {name: t.to(device) for name, t in made.items()} | {"capacity": R + budget}


def rows(count: int, V: int, setting: str, device: str = "cpu") -> tuple[Any, ...]:
    """temperature, top_p, top_k, seeds of `count` requests."""
    temperature, top_p, top_k = SETTINGS[setting]
    filters = torch.full((count,), top_k, dtype=torch.int32, device=device) if top_k else None
    full = [torch.full((count,), value, device=device) for value in (temperature, top_p)]
    return (*full, filters, torch.arange(count, device=device))


def verify_inputs(R: int, G: int, V: int, setting: str, noise: float, device: str = "cpu") -> dict[str, Any]:
    """R requests with G drafts each: the drafter's logits are the target's with `noise` standard deviations added."""
    g = torch.Generator(device).manual_seed(R)
    logits = torch.randn(R, 1 + G, V, generator=g, device=device) * SPREAD
    drafts = logits[:, :G] + torch.randn(R, G, V, generator=g, device=device) * noise
    s = rows(R, V, setting, device)
    out, at = new_proposals(R, G, device), torch.arange(R, device=device) * 7
    for k in range(G):
        draft_step(drafts, k, None, *s, at, out)
    positions = (at.unsqueeze(1) + torch.arange(1 + G, device=device)).flatten()
    cu_rows = torch.arange(0, R * (1 + G) + 1, 1 + G, dtype=torch.int32, device=device)
    names = ("temperature", "top_p", "top_k", "seeds")
    return {
        "logits": logits.view(-1, V), "draft_logits": drafts, "proposals": out, "cu_rows": cu_rows,
        "positions": positions, **dict(zip(names, s, strict=True)),
    }  # fmt: skip


def verify_bytes(inputs: dict[str, Any], accepted: torch.Tensor) -> int:
    """Every target row once, and the drafter's row of a draft that was rejected."""
    proposals: Proposals = inputs["proposals"]
    (R, G), V = proposals.tokens.shape, inputs["logits"].shape[1]
    greedy = bool((inputs["temperature"] < 1e-5).all())
    rejected = 0 if greedy else int((accepted.cpu() < G).sum())
    return inputs["logits"].nbytes + rejected * V * 4 + R * (1 + G) * 12

"""The confidence head in one launch."""

from __future__ import annotations

import torch

from kernel_core.cuda import cuda_module, pointer, same_device, stream


def confidence_head(
    hidden: torch.Tensor, markov: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    same_device(hidden, markov=markov, weight=weight, temperatures=temperatures)
    B, G, H = hidden.shape
    logits, confidence, survival = (torch.empty(B, G, device=hidden.device) for _ in range(3))
    if B:
        cuda_module("dspark_kernels").confidence_head(
            requests=B,
            drafts=G,
            hidden_size=H,
            markov_size=markov.shape[2],
            hidden=hidden.data_ptr(),
            hidden_request=hidden.stride(0),
            hidden_draft=hidden.stride(1),
            markov=markov.data_ptr(),
            weight=weight.data_ptr(),
            temperatures=pointer(temperatures),
            logits=logits.data_ptr(),
            confidence=confidence.data_ptr(),
            survival=survival.data_ptr(),
            stream=stream(hidden.device),
        )
    return logits, confidence, survival

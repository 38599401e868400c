"""A worker as a process of its own."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.rank import Worker, failure


def main(number: int, options: EpOptions, folder: str, mailbox: Connection, wrap: Any = None) -> None:
    """Load the model and serve until told to leave, or until the supervisor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what an interrupt means
    torch.set_num_threads(options.threads)
    try:
        from orchestrator.model.expert_parallel import CheckpointExperts
        from orchestrator.model.load import load_model
        from orchestrator.text.tokenizer import load_tokenizer

        model = load_model(folder, dense=options.engine.dense, device=options.engine.device)
        release_experts(model)
        Worker(number, options, model, load_tokenizer(folder), CheckpointExperts(folder), mailbox, wrap=wrap).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # nobody is left to serve
    except Exception as error:
        mailbox.send(failure(error))
        raise


def release_experts(model: Any) -> None:
    """Drop the routed experts that came with the checkpoint: a rank holds its own share, in its pool."""
    for moe, layer in zip(model.moe, model.weights.layers, strict=True):
        e = layer.experts
        for name in ("w13", "s13", "w2", "s2"):
            setattr(e, name, getattr(e, name)[:0].clone())
        moe.experts = e

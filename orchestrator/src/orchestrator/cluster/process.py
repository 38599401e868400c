"""A worker as a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.worker import Worker, failure

if TYPE_CHECKING:
    from orchestrator.model.expert_parallel import ExpertSource
    from orchestrator.model.transformer import Transformer
    from orchestrator.text.tokenizer import Tokenizer


class Loaded(NamedTuple):
    """What a worker serves, and where experts come from; layers of `model` may have none of their own."""

    model: Transformer
    tokenizer: Tokenizer | None
    source: ExpertSource


Load = Callable[[EpOptions], Loaded]
"""Called in the worker's process, which it is sent to."""


@dataclass(frozen=True)
class FromFolder:
    """A checkpoint, of which a rank reads no other experts than its own, and no image encoder without `vision`."""

    folder: str
    vision: bool = True

    def __call__(self, options: EpOptions) -> Loaded:
        from orchestrator.model.expert_parallel import CheckpointExperts
        from orchestrator.model.load import load_model
        from orchestrator.model.weights import ExpertsOf
        from orchestrator.text.tokenizer import load_tokenizer

        mine: ExpertsOf = () if options.spread_drafts else ("mtp",)
        engine = options.engine
        model = load_model(self.folder, dense=engine.dense, device=engine.device, experts=mine, vision=self.vision)
        return Loaded(model, load_tokenizer(self.folder), CheckpointExperts(self.folder))


def main(number: int, options: EpOptions, load: Load, wrap: Any, mailbox: Connection) -> None:
    """Load the model and serve until told to leave, or until the supervisor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what an interrupt means
    torch.set_num_threads(options.threads)
    try:
        if options.engine.device == "cuda":
            torch.cuda.set_device(number)
        model, tokenizer, source = load(options)
        Worker(number, options, model, tokenizer, source, mailbox, wrap=wrap).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # nobody is left to serve
    except Exception as error:
        mailbox.send(failure(error))
        raise

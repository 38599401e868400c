"""A slow float64 model of the text forward pass, written from the description alone: the judge of implementations.

The description is docs/model.md; docs/checkpoint.md has the tensor tables.

    oracle = Oracle(folder, token_map=...)
    trace = oracle.forward(tokens, cache="float")        # logits and every intermediate
    trace, report = oracle.follow(record)                # judge an export choice by choice
    assert report.passed, str(report)

It needs numpy only and imports nothing of the project, so that a mistake is not judged by itself.
"""

from .config import Config, config_from_dict, read_config
from .forward import Oracle
from .trace import Replay, Trace
from .weights import Stored, read_tensors

__all__ = ["Config", "Oracle", "Replay", "Stored", "Trace", "config_from_dict", "read_config", "read_tensors"]

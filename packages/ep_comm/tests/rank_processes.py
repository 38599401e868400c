"""Processes that stand for ranks: forked, so that none pays for importing PyTorch again."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import traceback
from collections.abc import Callable

import torch

_CONTEXT = multiprocessing.get_context("fork")


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


class _Pickler(pickle.Pickler):
    """Tensors by value: their process has ended when others read."""

    def reducer_override(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


class Processes:
    """`work(rank)` in a process each; `report(rank)` gives its result, or its exception as "Name: text"."""

    def __init__(self, ranks: int, work: Callable[[int], object]) -> None:
        self._pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
        self.processes = [_CONTEXT.Process(target=self._run, args=(rank, work), daemon=True) for rank in range(ranks)]
        for process, (_, sending) in zip(self.processes, self._pipes, strict=True):
            process.start()
            sending.close()

    def _run(self, rank: int, work: Callable[[int], object]) -> None:
        torch.set_num_threads(1)  # the parent's threads are not here
        try:
            result = work(rank)
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
            if not type(error).__module__.startswith("ep_comm"):
                traceback.print_exc()
        content = io.BytesIO()
        _Pickler(content).dump(result)
        self._pipes[rank][1].send_bytes(content.getvalue())

    def report(self, rank: int, seconds: float = 30.0) -> object:
        receiving = self._pipes[rank][0]
        assert receiving.poll(seconds), f"rank {rank} hangs"
        return pickle.loads(receiving.recv_bytes())

    def reports(self) -> list[object]:
        return [self.report(rank) for rank in range(len(self.processes))]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

"""One rank's end of memory that all ranks see: a process's own, or a file of one host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ep_comm import arguments
from ep_comm.communicator import Communicator, Moving
from ep_comm.errors import Broken, CommError, Mismatch, PeerTimeout
from ep_comm.moves import MemoryMoving
from ep_comm.results import Dispatched, Transfer
from ep_comm.shape import GROUP, Shape

_SLICE = 0.1  # seconds after which a wait looks at signals
_READY, _LATER, _TIMEOUT, _MISMATCH = range(4)
_RECORDS, _RESULTS, _GATHERED = range(3)
_KINDS = {"dispatch": 1, "combine": 2, "barrier": 3, "all_gather": 4}


class MemoryCommunicator(Communicator):
    """Made by `threads` and `shared_memory`; `end` is the native end, already joined."""

    def __init__(self, shape: Shape, rank: int, timeout: float, end: Any) -> None:
        self.shape, self.rank, self.timeout, self.epoch = shape, rank, timeout, 0
        self._end: Any = end
        self._ended = ""
        self._kind = "join"
        self._latest, self._tokens = 0, 0
        self._moves: list[MemoryMoving] = []

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, fixed: bool = False) -> Dispatched:
        end = self._alive()
        arguments.check_dispatch(self.shape, x, ids, weights)
        with self._collective("dispatch"):
            self._until(lambda: end.wait_free(_RECORDS, _SLICE))
            narrow = x.dtype == torch.bfloat16
            end.write_tokens(x.data_ptr(), narrow, ids.data_ptr(), weights.data_ptr(), x.shape[0])
            end.post()
            self._until(lambda: end.wait_posted(_SLICE))
            got = self._rows(end, fixed)
            end.finish()
        self._latest, self._tokens = self.epoch, x.shape[0]
        return got

    def combine(self, y: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        end = self._alive()
        slots = arguments.check_combine(self.shape, y, dispatched, out, self._tokens, self._latest)
        with self._collective("combine", 0 if slots else 1):
            if out is None:
                out = torch.empty(self._tokens, self.shape.hidden)
            self._until(lambda: end.wait_free(_RESULTS, _SLICE))
            end.write_results(y.data_ptr(), y.dtype == torch.bfloat16, slots)
            end.post()
            self._until(lambda: end.wait_posted(_SLICE))
            end.read_results(out.data_ptr(), slots)
            end.finish()
        return out

    def barrier(self) -> None:
        end = self._alive()
        with self._collective("barrier"):
            end.post()
            self._until(lambda: end.wait_posted(_SLICE))
            end.finish()

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        end = self._alive()
        arguments.check_row(row)
        n = row.numel()
        with self._collective("all_gather", n - 1):
            rows = torch.empty(self.shape.ranks, n, dtype=torch.int64)
            self._until(lambda: end.wait_free(_GATHERED, _SLICE))
            end.write_gathered(row.data_ptr(), n)
            end.post()
            self._until(lambda: end.wait_posted(_SLICE))
            end.read_gathered(rows.data_ptr(), n)
            end.finish()
        return rows

    def move(self, transfers: Sequence[Transfer]) -> Moving:
        end = self._alive()
        self._moves = [moving for moving in self._moves if moving.pending()]
        under_way = {(t.tag, t.source, t.target) for moving in self._moves for t in moving.pending()}
        arguments.check_transfers(self.shape, self.rank, transfers, under_way)
        moving = MemoryMoving(end, self.rank, self.timeout, lambda: self.epoch)
        self._moves.append(moving)
        moving.start(transfers)
        return moving

    def abort(self, reason: str) -> None:
        end, self._ended = self._end, self._ended or f"rank {self.rank} aborted: {reason}"
        if end is not None:
            end.abort(reason)

    def close(self) -> None:
        end, self._end = self._end, None
        self._ended = self._ended or f"rank {self.rank} closed the communicator"
        if end is not None:
            end.close()
        self._moves.clear()  # nothing touches their buffers any more

    def join(self) -> None:
        """Wait until all ranks are here. Constructors call it."""
        self._until(lambda: self._end.wait_joined(_SLICE))

    def _rows(self, end: Any, fixed: bool) -> Dispatched:
        shape = self.shape
        counts = torch.empty(shape.ranks, dtype=torch.int32)
        end.counts(counts.data_ptr())
        n = shape.ranks * shape.max_tokens if fixed else int(counts.sum())
        x = torch.empty(n, shape.hidden, dtype=shape.dispatch_dtype)
        scales = torch.empty(n, shape.hidden // GROUP) if shape.dispatch == "fp8" else None
        ids = torch.empty(n, shape.top_k, dtype=torch.int32)
        weights = torch.empty(n, shape.top_k)
        sources = torch.empty(n, dtype=torch.int32)
        scales_at = 0 if scales is None else scales.data_ptr()
        end.read_tokens(x.data_ptr(), scales_at, ids.data_ptr(), weights.data_ptr(), sources.data_ptr(), fixed)
        return Dispatched(x, scales, ids, weights, counts, sources, fixed, self.epoch)

    def _alive(self) -> Any:
        end = self._end
        if not self._ended and end is not None:
            self._ended = end.own_end()
        if self._ended:
            raise Broken(self._ended)
        return end

    @contextmanager
    def _collective(self, kind: str, detail: int = 0) -> Iterator[None]:
        self._kind = kind
        self.epoch = self._end.begin(_KINDS[kind], detail, self.timeout)
        try:
            yield
        except CommError:
            raise
        except BaseException as error:  # an interrupt, too little memory: peers must not wait for what will not come
            self.abort(f"{kind}, epoch {self.epoch}, ended with {error!r}")
            raise

    def _until(self, wait: Callable[[], Any]) -> None:
        while (verdict := wait()).code == _LATER:
            pass
        if verdict.code == _READY:
            return
        error: CommError
        if verdict.code == _TIMEOUT:
            error = PeerTimeout(self.rank, tuple(verdict.ranks), self._kind, self.epoch, self.timeout)
        elif verdict.code == _MISMATCH:
            error = Mismatch(verdict.text)
        else:
            error = Broken(verdict.text)
        self.abort(str(error))
        raise error

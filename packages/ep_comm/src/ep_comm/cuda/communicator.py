"""One rank on a GPU: checks, arguments of the kernels, and what they report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep_comm import arguments
from ep_comm.communicator import Communicator, Moving
from ep_comm.cuda import failures, sizes
from ep_comm.cuda.connection import Connection
from ep_comm.cuda.memory import FixedRows, native_shape
from ep_comm.errors import Broken
from ep_comm.results import Dispatched, Transfer
from ep_comm.shape import GROUP, Shape
from kernel_core.check import require
from kernel_core.cuda import aligned, cuda_module

PUSH, ANNOUNCE, COLLECT, COMBINE, BARRIER = range(5)


@dataclass(frozen=True)
class _Sent:
    """Kept alive until its dispatch's kernels have been queued behind."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor


class CudaCommunicator(Communicator):
    """Calls queue work on the current stream, and only a packed dispatch waits for it; a failure is raised by the next
    call, or by `check`. All work of a rank goes to one stream, or streams that are ordered.

    A fixed dispatch gives tensors in the communicator's own memory, written again by the next one: dispatch and combine
    can stand in a CUDA graph, whose replays count epochs on the device. All ranks of a dispatch choose the same form,
    and an id outside the group's experts counts as an empty slot. An exception's epoch is the device's count, without
    all_gather.
    """

    def __init__(self, shape: Shape, rank: int, device: torch.device, connection: Connection, *, timeout: float,
                 ctas: int, fixed: bool, packed: bool) -> None:  # fmt: skip
        self.shape, self.rank, self.timeout, self.epoch = shape, rank, timeout, 0
        self.device, self.connection, self.most_ctas = device, connection, ctas
        self._module: Any = cuda_module("ep_comm")
        region = self._module.Region(native_shape(self._module, shape), fixed, packed)
        self.offsets: dict[str, int] = region.offsets()
        self._packed = packed
        self._fixed = FixedRows(connection.memory, self.offsets, shape) if fixed else None
        self._report = torch.zeros(failures.BYTES, dtype=torch.uint8, pin_memory=True)
        self._host_counts = torch.zeros(shape.ranks, dtype=torch.int32, pin_memory=True)
        self._table = torch.tensor(connection.addresses, dtype=torch.int64, device=device)
        self.args = self._module.RankArgs(native_shape(self._module, shape), region, rank, int(timeout * 1e9))
        self.args.peers, self.args.report = self._table.data_ptr(), self._report.data_ptr()
        self._latest, self._tokens, self._ended = 0, 0, ""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, fixed: bool = False) -> Dispatched:
        sent = self.begin_dispatch(x, ids, weights, fixed)
        self.launch(PUSH if fixed else ANNOUNCE, [self], sizes.ctas_of(self.shape, self.most_ctas, fixed))
        if fixed:
            return self.fixed_rows(sent)
        torch.cuda.current_stream(self.device).synchronize()
        dispatched = self.packed_rows(sent)
        self.launch(COLLECT, [self], self.most_ctas)
        return dispatched

    def combine(self, y: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        out = self.begin_combine(y, dispatched, out)
        self.launch(COMBINE, [self], sizes.ctas_of(self.shape, self.most_ctas, dispatched.fixed))
        return out

    def barrier(self) -> None:
        self.begin_barrier()
        self.launch(BARRIER, [self], 1)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self._alive()
        arguments.check_row(row)
        self.epoch += 1
        return self.connection.gather(row, self.epoch, self.timeout)

    def move(self, transfers: Sequence[Transfer]) -> Moving:
        """Copies on a stream of their own, behind what is queued on the current one; buffers are on this GPU."""
        self._alive()
        for transfer in transfers:
            require(transfer.buffer.device == self.device, "buffer", transfer.buffer.device, str(self.device))
        arguments.check_transfers(self.shape, self.rank, transfers, self.connection.under_way())
        return self.connection.move(transfers, self.timeout)

    def check(self) -> None:
        """Waits for the current stream, then raises what went wrong, if anything did."""
        torch.cuda.current_stream(self.device).synchronize()
        self._alive()

    def abort(self, reason: str) -> None:
        self._end(failures.ABORTED, f"rank {self.rank} aborted: {reason}")

    def close(self) -> None:
        if self.connection.closed:
            return
        self._end(failures.CLOSED, f"rank {self.rank} closed the communicator")
        torch.cuda.synchronize(self.device)  # waits have ended: kernels do
        self._fixed = None
        self.connection.close()

    # The parts of a call, which `Together` puts together for several ranks.

    def launch(self, op: int, ranks: Sequence[CudaCommunicator], ctas: int) -> None:
        """One launch for `ranks`, which are on one GPU, `ctas` each."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            self._module.launch(op=op, ranks=[r.args for r in ranks], ctas=ctas, stream=stream)

    def begin_dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, fixed: bool) -> _Sent:
        self._alive()
        arguments.check_dispatch(self.shape, x, ids, weights, "cuda")
        self._on_device(x=x, ids=ids, weights=weights)
        require(aligned(x), "x", "an address that is no multiple of 16", "an aligned tensor")
        built = self._fixed is not None if fixed else self._packed
        require(built, "fixed", fixed, f"{not fixed}: the communicator has no buffers for the other form")
        if not fixed:
            capturing = torch.cuda.is_current_stream_capturing()
            require(not capturing, "fixed", "False in a CUDA graph", "True: packed rows wait for the host")
        counts = torch.empty(self.shape.ranks, dtype=torch.int32, device=self.device)
        self.epoch += 1
        self._latest, self._tokens = self.epoch, x.shape[0]
        a = self.args
        a.tokens, a.x, a.x_narrow = x.shape[0], x.data_ptr(), x.dtype is torch.bfloat16
        a.ids, a.weights, a.counts = ids.data_ptr(), weights.data_ptr(), counts.data_ptr()
        a.host_counts = 0 if fixed else self._host_counts.data_ptr()
        return _Sent(x, ids, weights, counts)

    def fixed_rows(self, sent: _Sent) -> Dispatched:
        rows = self._fixed
        assert rows is not None
        return Dispatched(rows.x, rows.scales, rows.ids, rows.weights, sent.counts, rows.sources, True, self.epoch)

    def packed_rows(self, sent: _Sent) -> Dispatched:
        """Once the announcement has run: memory for the rows, which `COLLECT` fills."""
        self._alive()
        shape, device = self.shape, self.device
        rows = int(self._host_counts.sum())
        groups = shape.hidden // GROUP if shape.dispatch == "fp8" else 0
        x = torch.empty(rows, shape.hidden, dtype=shape.dispatch_dtype, device=device)
        scales = torch.empty(rows, groups, device=device) if groups else None
        ids = torch.empty(rows, shape.top_k, dtype=torch.int32, device=device)
        weights = torch.empty(rows, shape.top_k, device=device)
        sources = torch.empty(rows, dtype=torch.int32, device=device)
        a = self.args
        a.rows_x, a.rows_scales = x.data_ptr(), 0 if scales is None else scales.data_ptr()
        a.rows_ids, a.rows_weights, a.rows_sources = ids.data_ptr(), weights.data_ptr(), sources.data_ptr()
        return Dispatched(x, scales, ids, weights, sent.counts, sources, False, self.epoch)

    def begin_combine(self, y: torch.Tensor, dispatched: Dispatched, out: torch.Tensor | None) -> torch.Tensor:
        self._alive()
        slots = arguments.check_combine(self.shape, y, dispatched, out, self._tokens, self._latest, "cuda")
        self._on_device(y=y, out=out)
        if out is None:
            out = torch.empty(self._tokens, self.shape.hidden, device=self.device)
        require(aligned(y, out), "y", "an address that is no multiple of 16", "aligned tensors")
        self.epoch += 1
        a = self.args
        a.y, a.y_narrow, a.out, a.tokens = y.data_ptr(), y.dtype is torch.bfloat16, out.data_ptr(), self._tokens
        a.form, a.fixed = 0 if slots else 1, dispatched.fixed
        a.counts, a.rows_ids = dispatched.counts.data_ptr(), dispatched.ids.data_ptr()
        a.rows_sources = dispatched.sources.data_ptr()
        return out

    def begin_publish(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Checks, and fills the arguments that `publish` reads."""
        self._alive()
        arguments.check_dispatch(self.shape, x, ids, weights, "cuda")
        self._on_device(x=x, ids=ids, weights=weights)
        self.epoch += 1
        a = self.args
        a.tokens, a.x, a.x_narrow = x.shape[0], x.data_ptr(), x.dtype is torch.bfloat16
        a.ids, a.weights = ids.data_ptr(), weights.data_ptr()

    def launch_publish(self, **arguments_of_it: int) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            self._module.publish(rank=self.args, stream=stream, **arguments_of_it)

    def begin_barrier(self) -> None:
        self._alive()
        self.epoch += 1

    def _on_device(self, **tensors: torch.Tensor | None) -> None:
        for name, value in tensors.items():
            if value is not None:
                require(value.device == self.device, name, f"a tensor on {value.device}", str(self.device))

    def _alive(self) -> None:
        if self._ended:
            raise Broken(self._ended)
        error = failures.failure(self._report, self.rank, self.timeout)
        if error is not None:
            self._ended = str(error)
            self.connection.end(self._ended)
            raise error

    def _end(self, why: int, reason: str) -> None:
        if self._ended:
            return
        self._ended = reason
        self.connection.end(reason)
        word = failures.ended_word(why, self.rank)
        with torch.cuda.device(self.device):
            for address in self.connection.addresses:
                self._module.store_word(to=address + self.offsets["ended"], value=word)

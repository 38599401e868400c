"""A rank of a process group: Gloo with tensors on CPUs, NCCL with tensors on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ep_comm import arguments
from ep_comm.communicator import Communicator, Moving
from ep_comm.errors import Broken, CommError, Mismatch
from ep_comm.over_groups.data import Data, MessageData, NcclData
from ep_comm.over_groups.links import Links, Message, Type
from ep_comm.over_groups.mailbox import Mailbox
from ep_comm.over_groups.records import fixed_rows, read_records, write_records
from ep_comm.over_groups.transfers import GroupMoving, Transfers
from ep_comm.results import Dispatched, Transfer
from ep_comm.shape import Shape
from ep_comm.shared import TIMEOUT, check_timeout
from kernel_core.check import require

_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_FAREWELL = 0.5  # seconds at most for last words
_IS_MISMATCH = 1
_BACKENDS = {"gloo": "cpu", "nccl": "cuda"}


def distributed(
    group: dist.ProcessGroup | None, shape: Shape, timeout: float = TIMEOUT, *, control: dist.ProcessGroup | None = None
) -> Communicator:
    """One rank of a process group of torch.distributed, across machines too. All ranks call it, in the same order.

    group: None is the default group. Gloo takes tensors on the CPU, NCCL those of the current CUDA device.
    control: with NCCL, a Gloo group of the same ranks: headers, counts, host-side collectives and moves go over it, so
        that waits end in time and name who is missing. Data of NCCL itself have the group's own time-out.
    timeout: seconds that any wait lasts at most, that for the other ranks here too.

    Raises:
        ValueError: the group has another number of ranks, or a backend that is not supported.
        Mismatch: a peer has another shape.
        PeerTimeout, Broken: a peer did not come, or is gone.
    """
    check_timeout(timeout)
    backend = dist.get_backend(group)
    require(backend in _BACKENDS, "group", f"backend {backend}", "gloo or nccl")
    ranks = dist.get_world_size(group)
    require(ranks == shape.ranks, "group", f"{ranks} ranks", f"{shape.ranks}, those of the shape")
    if backend == "nccl":
        require(control is not None and dist.get_backend(control) == "gloo", "control", control, "a gloo group")
        require(dist.get_world_size(control) == ranks, "control", f"{dist.get_world_size(control)} ranks", str(ranks))
    return GroupCommunicator(group, group if backend == "gloo" else control, shape, timeout, _BACKENDS[backend])


class GroupCommunicator(Communicator):
    """Made by `distributed`."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        shape: Shape,
        timeout: float,
        device: str,
    ) -> None:
        self.shape, self.rank, self.timeout, self.epoch = shape, dist.get_rank(control), timeout, 0
        self._device = device
        self._ended = ""
        self._latest, self._ids = 0, torch.empty(0, shape.top_k, dtype=torch.int32)
        self._sent: list[torch.Tensor] = []  # tokens for each rank, of the latest dispatch
        self._moves: list[GroupMoving] = []
        key = control if control is not None else dist.group.WORLD
        assert key is not None  # torch.distributed has been set up: the group has ranks
        channel = _CHANNELS.get(key, 0)
        _CHANNELS[key] = channel + 1
        self._mail = Mailbox(self.rank, shape.ranks)
        self._transfers: Transfers | None = None  # messages may come before it is there
        self._links = Links(control, channel, self._receive, self._mail.leave)
        self._transfers = Transfers(self._links, self._mail.changed, self._mail.gone, self.rank)
        self._data: Data = (
            MessageData(self._links, self._mail) if device == "cpu" else NcclData(self._links, self._mail, group)
        )
        self._join()

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, fixed: bool = False) -> Dispatched:
        self._alive()
        arguments.check_dispatch(self.shape, x, ids, weights, self._device)
        with self._collective("dispatch"):
            records = write_records(self.shape, x, ids, weights)
            owners = torch.where(ids < 0, -1, torch.div(ids, self.shape.experts, rounding_mode="floor"))
            self._sent = [(owners == rank).any(1).nonzero().flatten() for rank in range(self.shape.ranks)]
            parts = self._data.exchange(
                self.epoch, "dispatch", 0, [records[tokens] for tokens in self._sent], self.timeout
            )
            got = read_records(self.shape, self.rank, parts, fixed, self.epoch)
        self._latest, self._ids = self.epoch, ids.clone()
        got.state = [part.shape[0] for part in parts]
        return got

    def combine(self, y: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self._alive()
        tokens, shape = self._ids.shape[0], self.shape
        slots = arguments.check_combine(shape, y, dispatched, out, tokens, self._latest, self._device)
        with self._collective("combine", 0 if slots else 1):
            results = self._results(y, dispatched, slots)
            parts = self._data.exchange(self.epoch, "combine", 0 if slots else 1, results, self.timeout)
            rows = [part.view(shape.combine_dtype).float() for part in parts]
            out = torch.empty(tokens, shape.hidden, device=y.device) if out is None else out
            out.zero_()
            if slots:
                self._add_slots(out, rows)
            else:
                for sent, part in zip(self._sent, rows, strict=True):
                    out[sent] += part
        return out

    def barrier(self) -> None:
        self._alive()
        with self._collective("barrier"):
            if self._device == "cuda":
                torch.cuda.current_stream().synchronize()
            self._data.tell(self.epoch, "barrier", 0, None, self.timeout)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self._alive()
        arguments.check_row(row)
        with self._collective("all_gather", row.numel() - 1):
            sent = row.clone()
            parts = self._data.tell(self.epoch, "all_gather", row.numel() - 1, sent.view(torch.uint8), self.timeout)
            rows = [sent if rank == self.rank else parts[rank].view(torch.int64) for rank in range(self.shape.ranks)]
        return torch.stack(rows)

    def move(self, transfers: Sequence[Transfer]) -> Moving:
        self._alive()
        assert self._transfers is not None
        self._moves = [moving for moving in self._moves if moving.pending()]
        under_way = {(t.tag, t.source, t.target) for moving in self._moves for t in moving.pending()}
        arguments.check_transfers(self.shape, self.rank, transfers, under_way)
        started = [self._transfers.start(transfer) for transfer in transfers]
        moving = GroupMoving(self._transfers, started, self.rank, self.timeout, lambda: self.epoch)
        self._moves.append(moving)
        return moving

    def abort(self, reason: str) -> None:
        self._abort(reason)

    def close(self) -> None:
        self._ended = self._ended or f"rank {self.rank} closed the communicator"
        if self._transfers is not None:
            self._transfers.end_all(self._ended)
        self._links.close(_FAREWELL)
        self._moves.clear()

    def _abort(self, reason: str, mismatch: bool = False) -> None:
        if self._ended:
            return
        self._ended = f"rank {self.rank} aborted: {reason}"
        self._mail.end(self.rank, Broken(self._ended))
        payload = torch.frombuffer(bytearray(reason.encode() or b" "), dtype=torch.uint8)
        self._links.tell_all(Type.abort, _IS_MISMATCH if mismatch else 0, payload)
        if self._transfers is not None:
            self._transfers.end_all(self._ended)
        self._links.flush(_FAREWELL)  # callers often end the process next

    def _receive(self, peer: int, message: Message) -> None:
        if message.type == Type.part:
            self._mail.put(peer, message.number, message.detail, message.payload)
        elif message.type == Type.abort:
            reason = bytes(message.payload.tolist()).decode(errors="replace")
            # A mismatch is one of all ranks, whichever saw it first.
            mismatch = message.number == _IS_MISMATCH
            self._mail.end(peer, Mismatch(reason) if mismatch else Broken(f"rank {peer} aborted: {reason}"))
        elif message.type == Type.bye:
            self._mail.leave(peer, f"rank {peer} closed the communicator")
        elif self._transfers is not None:
            self._transfers.receive(peer, message)

    def _join(self) -> None:
        shape = self.shape
        mine = repr(shape)
        with self._collective("join", first=True):
            payload = torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8)
            parts = self._data.tell(0, "join", 0, payload, self.timeout)
            for peer, part in parts.items():
                theirs = bytes(part.tolist()).decode(errors="replace")
                if theirs != mine:
                    raise Mismatch(f"rank {peer} has {theirs}, rank {self.rank} {mine}")

    def _results(self, y: torch.Tensor, dispatched: Dispatched, slots: bool) -> list[torch.Tensor]:
        """For each home, uint8 rows in the order in which it sent: by token, then by slot."""
        sizes: list[int] = dispatched.state  # type: ignore[assignment]
        rows = torch.arange(sum(sizes), device=y.device)
        if dispatched.fixed:
            rows = fixed_rows(self.shape, sizes, y.device)
        results = []
        for here in rows.split(sizes):
            values = y[here]
            if slots:
                values = values[dispatched.ids[here] >= 0]
            results.append(values.to(self.shape.combine_dtype).contiguous().view(torch.uint8))
        return results

    def _add_slots(self, out: torch.Tensor, rows: list[torch.Tensor]) -> None:
        shape = self.shape
        owners = torch.where(self._ids < 0, -1, torch.div(self._ids, shape.experts, rounding_mode="floor"))
        results = torch.empty(*self._ids.shape, shape.hidden, device=out.device)
        for rank, part in enumerate(rows):
            results[owners == rank] = part
        for slot in range(shape.top_k):
            here = owners[:, slot] >= 0
            out[here] += results[here, slot]

    def _alive(self) -> None:
        if self._ended:
            raise Broken(self._ended)

    @contextmanager
    def _collective(self, kind: str, detail: int = 0, first: bool = False) -> Iterator[None]:
        self.epoch += not first
        try:
            yield
        except CommError as error:
            self._abort(str(error), isinstance(error, Mismatch))
            raise
        except RuntimeError as error:  # of torch.distributed: a connection has ended
            self.abort(f"{kind}, epoch {self.epoch}: {error}")
            raise Broken(self._ended) from error
        except BaseException as error:  # an interrupt, too little memory: peers must not wait for what will not come
            self.abort(f"{kind}, epoch {self.epoch}, ended with {error!r}")
            raise

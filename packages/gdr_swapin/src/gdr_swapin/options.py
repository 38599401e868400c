"""What can be turned at a loader; results never depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_core import check

METHODS = ("threads", "copy", "stage", "mixed", "gather", "gather_plain")


@dataclass(frozen=True)
class Options:
    """most_in_flight: transfers at once; one more is refused.

    threads: CPU threads that copy. streams: streams that feed the copy engines, so that the gap between two copies of
    one is filled by another; 0 takes two for whole blocks and one for smaller pieces, and "copy" takes more than
    one only without batched calls. pieces_a_call: of a batched call,
    at most 256; of larger batches the driver was seen to leave copies out without an error.
    prefer_overlap: ask the driver for copies that leave multiprocessors alone. any_order: let it read a leased arena
    ahead of the stream's order. batched: use the batched call where the driver has it. regular_from: blocks in a row,
    on both sides, that are worth a strided copy; 0 never. paired: two scattered pieces of "copy" as two rows of one.

    staging_bytes, staging_parts: device memory of "stage" and the number of parts that it is cut into. first_blocks:
    of its first round, which the engines start with while later ones, each half as large again, are planned. order:
    "layer" stages slice by slice in deadline order; "first" the first layer's slices, then the rest of each block in
    larger copies; "block" whole blocks, so that all layers arrive together; "lead" the first layer by the gather
    kernel and the rest of each block by copies, from lead_from blocks on, and whole blocks below ("mixed" takes whole
    blocks always). scatter_ctas,
    scatter_loads: CTAs of the kernel behind it; 16-byte loads under way a thread, 0 for asynchronous bulk copies.

    gather_share: of the blocks that "mixed" leaves to the gather kernel. ctas: of the gather kernels. piece_bytes,
    stages: ring in a CTA's shared memory. loads: of "gather_plain". one_launch: "gather" launches one kernel for all
    layers, which counts them as they land, where the driver lets streams wait for memory; otherwise a kernel a layer.
    gather_order: of such a launch, in the words of `order`: which of a block's layers are read together.
    stream_once: what gather kernels read is the first to leave the L2 cache.
    """

    most_in_flight: int = 4
    threads: int = 2
    streams: int = 0
    pieces_a_call: int = 64
    prefer_overlap: bool = True
    any_order: bool = False
    batched: bool = True
    regular_from: int = 8
    paired: bool = False
    staging_bytes: int = 64 << 20
    staging_parts: int = 8
    first_blocks: int = 8
    order: str = "lead"
    scatter_ctas: int = 16
    scatter_loads: int = 0
    gather_share: float = 0.15
    ctas: int = 4
    piece_bytes: int = 22784
    stages: int = 9
    loads: int = 1
    one_launch: bool = False
    gather_order: str = "layer"
    stream_once: bool = False
    lead_from: int = 2048

    def __post_init__(self) -> None:
        ranges = {
            "most_in_flight": (1, 64),
            "threads": (1, 256),
            "streams": (0, 8),
            "pieces_a_call": (1, 256),
            "regular_from": (0, 1 << 30),
            "staging_bytes": (1 << 12, 1 << 34),
            "staging_parts": (2, 64),
            "first_blocks": (1, 1 << 20),
            "scatter_ctas": (1, 1024),
            "ctas": (1, 1024),
            "lead_from": (1, 1 << 30),
            "piece_bytes": (16, 1 << 17),
            "stages": (4, 64),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            check.require(low <= value <= high, name, value, f"{low} to {high}")
        check.require(0 <= self.gather_share <= 1, "gather_share", self.gather_share, "0 to 1")
        orders = ("layer", "first", "block")
        check.require(self.order in (*orders, "lead"), "order", repr(self.order), f"one of {(*orders, 'lead')}")
        check.require(self.gather_order in orders, "gather_order", repr(self.gather_order), f"one of {orders}")
        check.require(self.scatter_loads in (0, 1, 4, 8), "scatter_loads", self.scatter_loads, "0, 1, 4 or 8")
        check.require(self.loads in (1, 4, 8), "loads", self.loads, "1, 4 or 8")
        check.require(self.piece_bytes % 16 == 0, "piece_bytes", self.piece_bytes, "a multiple of 16")
        room = 227 * 1024 - 4096  # the ring's head takes less than 4 KB
        check.require(self.piece_bytes * self.stages <= room, "stages",
                      f"{self.stages} stages of {self.piece_bytes} bytes",
                      f"at most {room} bytes of shared memory")  # fmt: skip

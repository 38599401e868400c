"""Expert weights as the SM90 kernels read them: packed once at load, on any device, and back, exactly.

A weight [R, K] becomes blocks of 128 rows (two tiles of 64), each a run of steps; a step holds 128 columns of MXFP4 or
64 of FP8: codes of both tiles, then scales of both. csrc/cuda/sm90/expert_layout.cuh says where what stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_core.check import require, tensor
from mega_moe.weights import SharedExpert

LARGEST_SCALE = 128  # of MXFP4: a factor of 2^(byte - 1) has to be a bfloat16
_LARGEST_FP8_SCALE = 134
_SCALE_BIAS = 126
_MULTIPLE = 256  # of both widths
_STEP, _FP8_STEP = 128, 64
_STATE_WORDS = 1 << 15  # for 250,000 rows
_CODE_BYTES, _SCALE_BYTES, _FP8_SCALE_BYTES = 4096, 256, 16  # of a tile in a step


@dataclass(frozen=True)
class PackedExperts:
    """Weights of all routed experts and, where there is one, of the shared expert.

    w13: uint8 [E, bytes], gate and up rows interleaved; w2: uint8 [E, bytes]; shared13, shared2: uint8 [bytes], FP8.
    state: int32, the kernel's counters, zero before a launch and after it. Launches with the same weights must not run
    at the same time.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    d: int
    inter: int
    state: torch.Tensor
    shared13: torch.Tensor | None = None
    shared2: torch.Tensor | None = None


def fits(d: int, inter: int) -> bool:
    """Whether the kernels have tiles for these widths."""
    return d > 0 and inter > 0 and d % _MULTIPLE == 0 and inter % _MULTIPLE == 0


def pack_experts(
    w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, shared: SharedExpert | None = None
) -> PackedExperts:
    """Pack the weights that `mega_moe.fused_experts` takes.

    Raises ValueError for widths that are no multiples of 256, for MXFP4 scales above 2^1 and FP8 scales above 2^7
    (both far above those of checkpoints) and for a shared expert of another width. Reads scales back to the host.
    """
    experts, d, half = w2.shape
    inter = 2 * half
    require(fits(d, inter), "w2", f"[{d}, {inter}]", "multiples of 256")
    a, b = None, None
    if shared is not None:
        require(tuple(shared.w2.shape) == (d, inter), "shared.w2", list(shared.w2.shape), f"[{d}, {inter}]")
        a = pack_fp8(shared.w13, shared.s13, interleaved=True)
        b = pack_fp8(shared.w2, shared.s2, interleaved=False)
    # Expert by expert into the whole: beside it and the stored weights there is no room for a third copy.
    first, second = (
        torch.empty(experts, weight_bytes(*shape), dtype=torch.uint8, device=w2.device)
        for shape in ((2 * inter, d), (d, inter))
    )
    for e in range(experts):
        first[e] = pack_mxfp4(w13[e], s13[e], interleaved=True)
        second[e] = pack_mxfp4(w2[e], s2[e], interleaved=False)
    return PackedExperts(first, second, d, inter, new_state(w2.device), a, b)


def weight_bytes(rows: int, columns: int) -> int:
    """Of a packed MXFP4 weight."""
    return rows // 128 * (columns // _STEP) * 2 * (_CODE_BYTES + _SCALE_BYTES)


def holds(s13: torch.Tensor, s2: torch.Tensor, shared: SharedExpert | None) -> bool:
    """Whether all scales have a place in the packed form. Reads back to the host."""
    largest = max(int(s.max()) if s.numel() else 0 for s in (s13, s2))
    fp8 = 0 if shared is None else max(int(shared.s13.max()), int(shared.s2.max()))
    return largest <= LARGEST_SCALE and fp8 <= _LARGEST_FP8_SCALE


Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def unpack_experts(packed: PackedExperts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Four | None]:
    """The exact inverse of `pack_experts`: w13, s13, w2, s2, and those of the shared expert."""
    d, inter = packed.d, packed.inter
    first = [unpack_mxfp4(one, 2 * inter, d, interleaved=True) for one in packed.w13]
    second = [unpack_mxfp4(one, d, inter, interleaved=False) for one in packed.w2]
    shared = None
    if packed.shared13 is not None and packed.shared2 is not None:
        a = unpack_fp8(packed.shared13, 2 * inter, d, interleaved=True)
        shared = (*a, *unpack_fp8(packed.shared2, d, inter, interleaved=False))
    w13, s13, w2, s2 = (torch.stack([pair[i] for pair in side]) for side in (first, second) for i in (0, 1))
    return w13, s13, w2, s2, shared


def new_state(device: torch.device) -> torch.Tensor:
    """A kernel's counters."""
    return torch.zeros(_STATE_WORDS, dtype=torch.int32, device=device)


def split_rows(values: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[R, ...] to [tile, warp, row or row + 8, 8, ...]; interleaved: gate rows and up rows take turns by 8."""
    if not interleaved:
        return values.unflatten(0, (-1, 4, 2, 8))
    return values.unflatten(0, (2, -1, 4, 8)).movedim(0, 2)


def join_rows(values: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        values = values.movedim(2, 0)
    return values.flatten(0, 3)


def _bit(reg: int, half: int, bit: int) -> int:
    """Where bit `bit` of the code for register `reg`, column `half` of its pair, stands in a word."""
    at = (15 if bit == 3 else 6 + bit) + 16 * half
    moved = (at, at + 6, at - 6, at + 4 if bit == 0 else at - 4)[reg]
    return moved % 32


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def pack_mxfp4(codes: torch.Tensor, scale: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """uint8 [R, K/2] (even column in the low nibble) and UE8M0 [R, K/32] to uint8 [bytes]; R and K of 128."""
    tensor("codes", codes, dtype=torch.uint8, shape=(None, None))
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    tensor("scale", scale, dtype=torch.uint8, shape=(rows, columns // 32))
    require(rows % 128 == 0 and columns % _STEP == 0, "codes", f"[{rows}, {columns}]", "multiples of 128")
    largest = int(scale.max()) if scale.numel() else 0
    require(largest <= LARGEST_SCALE, "scale", largest, f"at most {LARGEST_SCALE}")
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    # [tile, warp, r, g, step, piece, product, k, c, half]
    parts = split_rows(nibbles, interleaved).unflatten(-1, (-1, 2, 4, 2, 4, 2))
    words = torch.zeros((), dtype=torch.int32, device=codes.device)
    for r in range(2):
        for k in range(2):
            for half in range(2):
                reg = r + 2 * k
                spread = [
                    _signed(sum((code >> bit & 1) << _bit(reg, half, bit) for bit in range(4))) for code in range(16)
                ]
                table = torch.tensor(spread, dtype=torch.int32, device=codes.device)
                words = words | table[parts[:, :, r, :, :, :, :, k, :, half].int()]
    # [tile, warp, g, step, piece, product, c] to [step, piece, warp, g, c, product] of each tile
    words = words.permute(0, 3, 4, 1, 2, 6, 5)
    scales = split_rows(scale + _SCALE_BIAS, interleaved).unflatten(-1, (-1, 2, 2)).permute(0, 4, 1, 3, 5, 2, 6)
    return join_steps(words.contiguous().view(torch.uint8), scales)


def join_steps(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[tile, step, ...] each to [block, step, both tiles' codes, both tiles' scales]."""
    halves = [part.flatten(2).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for part in (codes, scales)]
    return torch.cat(halves, dim=-1).flatten().contiguous()


def split_steps(packed: torch.Tensor, rows: int, columns: int, scale_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `join_steps`: [tile, step, bytes] twice."""
    steps = packed.view(rows // 128, columns, -1)
    codes, scales = steps.split((2 * _CODE_BYTES, 2 * scale_bytes), dim=-1)
    first, second = (part.unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1) for part in (codes, scales))
    return first, second


def unpack_mxfp4(
    packed: torch.Tensor, rows: int, columns: int, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of `pack_mxfp4`."""
    codes, scales = split_steps(packed, rows, columns // _STEP, _SCALE_BYTES)
    words = codes.contiguous().view(torch.int32).unflatten(-1, (2, 4, 8, 4, 4)).permute(0, 3, 4, 1, 2, 6, 5)
    parts = words.new_zeros(words.shape[0], 4, 2, 8, *words.shape[3:6], 2, 4, 2, dtype=torch.uint8)
    for r in range(2):
        for k in range(2):
            for half in range(2):
                reg = r + 2 * k
                code = sum((words >> _bit(reg, half, bit) & 1) << bit for bit in range(4))
                assert torch.is_tensor(code)
                parts[:, :, r, :, :, :, :, k, :, half] = code.to(torch.uint8)
    nibbles = join_rows(parts, interleaved).flatten(1)
    scale = scales.unflatten(-1, (4, 8, 2, 2, 2)).permute(0, 2, 5, 3, 1, 4, 6)
    joined = join_rows(scale, interleaved).flatten(1) - _SCALE_BIAS
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, joined.contiguous()


def pack_fp8(weight: torch.Tensor, scale: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """float8_e4m3fn [R, K] and UE8M0 [R/32, K/32] to uint8 [bytes]; R of 128, K of 64."""
    tensor("weight", weight, dtype=torch.float8_e4m3fn, shape=(None, None))
    rows, columns = weight.shape
    tensor("scale", scale, dtype=torch.uint8, shape=(rows // 32, columns // 32))
    require(rows % 128 == 0 and columns % _FP8_STEP == 0, "weight", f"[{rows}, {columns}]", "multiples of 128 and 64")
    largest = int(scale.max()) if scale.numel() else 0
    require(largest <= _LARGEST_FP8_SCALE, "scale", largest, f"at most {_LARGEST_FP8_SCALE}")
    # [tile, warp, r, g, step, piece, product, k, c, half]
    parts = split_rows(weight.view(torch.uint8), interleaved).unflatten(-1, (-1, 2, 2, 2, 4, 2))
    codes = parts.permute(0, 4, 5, 1, 3, 8, 6, 2, 7, 9)
    # one scale for the eight rows of a lane's place: [tile, warp, r, step, piece]
    scales = split_rows(scale.repeat_interleave(32, dim=0), interleaved)[:, :, :, 0].unflatten(-1, (-1, 2))
    return join_steps(codes, scales.permute(0, 3, 1, 2, 4))


def unpack_fp8(
    packed: torch.Tensor, rows: int, columns: int, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of `pack_fp8`."""
    codes, scales = split_steps(packed, rows, columns // _FP8_STEP, _FP8_SCALE_BYTES)
    parts = codes.unflatten(-1, (2, 4, 8, 4, 2, 2, 2, 2)).permute(0, 3, 7, 4, 1, 2, 6, 8, 5, 9)
    weight = join_rows(parts, interleaved).flatten(1).contiguous().view(torch.float8_e4m3fn)
    grid = scales.unflatten(-1, (4, 2, 2)).permute(0, 2, 3, 1, 4)  # [tile, warp, r, step, piece]
    full = grid.unsqueeze(3).expand(-1, -1, -1, 8, -1, -1)
    return weight, join_rows(full, interleaved).flatten(1)[::32].contiguous()

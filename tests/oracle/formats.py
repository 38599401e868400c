"""Cache rows in exact arithmetic: E2M1, E4M3 and UE8M0 codes, and the main, window and index rows made of them.

Everything is derived from the tables of representable magnitudes, with no bit tricks, so that a kernel's decoder and
this one share nothing. See docs/model.md, Cache rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Magnitudes in code order; the sign bit stands above them. Code 127 of E4M3 is NaN and is left out.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])[
    :127
]


def nearest(table: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Code of the closest magnitude: ties to the even code, above the largest it saturates."""
    middle = (table[1:] + table[:-1]) / 2
    code = np.searchsorted(middle, magnitude, side="left")
    inside = code < len(middle)
    tie = inside & (magnitude == middle[np.minimum(code, len(middle) - 1)])
    return code + (tie & (code % 2 == 1))


def decode_signed(table: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Value of sign-and-magnitude codes; a code outside of the table (E4M3 NaN) gives NaN."""
    sign_bit = len(table) if len(table) == 8 else 128
    values = np.full(2 * sign_bit, np.nan)
    values[: len(table)] = table
    values[sign_bit : sign_bit + len(table)] = -table
    return values[code]


def ue8m0(byte: np.ndarray) -> np.ndarray:
    """Value of a power-of-two scale byte, 2**(byte - 127); 255 is NaN."""
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int64) - 127))


def _power_of_two_byte(ratio: np.ndarray) -> np.ndarray:
    """Byte of the smallest power of two that is not below `ratio`."""
    mantissa, exponent = np.frexp(ratio)  # ratio = mantissa * 2**exponent with mantissa in [0.5, 1)
    return exponent - (mantissa == 0.5) + 127


@dataclass(frozen=True)
class Format:
    """One kind of row: `group` values share a scale; codes come first in a row, then one byte a scale."""

    name: str
    group: int
    table: np.ndarray

    @property
    def packed(self) -> bool:
        """Two 4-bit codes a byte, the even element in the low nibble."""
        return len(self.table) == 8

    @property
    def sign_bit(self) -> int:
        return 8 if self.packed else 128

    def row_bytes(self, dim: int) -> int:
        return dim // (2 if self.packed else 1) + dim // self.group

    def dim(self, row_bytes: int) -> int:
        per_group = self.row_bytes(self.group)
        if row_bytes % per_group:
            raise ValueError(f"a {self.name} row has a multiple of {per_group} bytes, got {row_bytes}")
        return row_bytes // per_group * self.group

    def scale_byte(self, amax: np.ndarray) -> np.ndarray:
        """Stored scale for a group whose largest magnitude is `amax`. Monotone in `amax`."""
        if self.name == "main":  # a rounded E4M3 scale; the floor is its smallest subnormal
            return nearest(E4M3, np.maximum(amax, 6 * 2.0**-9) / 6)
        if self.name == "window":  # the next power of two, so that nothing saturates
            return _power_of_two_byte(np.maximum(amax, 1e-4) / 448)
        return _power_of_two_byte(np.maximum(amax, 6 * 2.0**-126) / 6)

    def scale_value(self, byte: np.ndarray) -> np.ndarray:
        if self.name == "main":
            return decode_signed(E4M3, byte)
        return ue8m0(byte)

    def in_units(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """x over scale as the writers compute it: main rows multiply by a reciprocal, twice rounded to float32."""
        if self.name != "main":
            return x / scale
        reciprocal = (np.float32(1) / scale.astype(np.float32)).astype(np.float32)
        return (x.astype(np.float32) * reciprocal).astype(np.float64)

    def codes(self, grouped: np.ndarray, scale_byte: np.ndarray) -> np.ndarray:
        """Signed codes of values [..., groups, group] under given scale bytes [..., groups]."""
        units = self.in_units(grouped, self.scale_value(scale_byte)[..., None])
        return nearest(self.table, np.abs(units)) + self.sign_bit * np.signbit(units)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Rows uint8[..., row] of values [..., dim], which are rounded to float32 first: rows are made from those."""
        x = values.astype(np.float32).astype(np.float64)
        grouped = x.reshape(*x.shape[:-1], x.shape[-1] // self.group, self.group)
        scale = self.scale_byte(np.abs(grouped).max(-1))
        return self.join(self.codes(grouped, scale).reshape(x.shape), scale)

    def join(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        if self.packed:
            codes = codes[..., 0::2] + 16 * codes[..., 1::2]
        return np.concatenate([codes, scale], -1).astype(np.uint8)

    def split(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes [..., dim] and scale bytes [..., dim / group] of rows."""
        dim = self.dim(rows.shape[-1])
        cut = dim // (2 if self.packed else 1)
        codes, scale = rows[..., :cut].astype(np.int64), rows[..., cut:].astype(np.int64)
        if self.packed:
            codes = np.stack([codes % 16, codes // 16], -1).reshape(*rows.shape[:-1], dim)
        return codes, scale

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Values float64[..., dim] of rows; each is exact (few significant bits)."""
        codes, scale = self.split(rows)
        return decode_signed(self.table, codes) * np.repeat(self.scale_value(scale), self.group, axis=-1)


MAIN = Format("main", 16, E2M1)
WINDOW = Format("window", 32, E4M3)
INDEX = Format("index", 32, E2M1)

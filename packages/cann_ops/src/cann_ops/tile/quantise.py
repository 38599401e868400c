"""What programs share that make cache rows or MX rows: powers of two, E4M3 scales, codes of 128 values. SIMD macros.

Vectors have 64 lanes of float32. 128 values are held as two of them, the even and the odd ones: a 32-byte block of
either is then one group of 16 values, which is what the reduction by blocks and the load that spreads over blocks need.
"""

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S

MANTISSA = 0x7FFFFF
NAN = 0x7FC00000
MAIN_FLOOR = 6 * 2.0**-9
WINDOW_FLOOR = 1e-4
INDEX_FLOOR = 6 * 2.0**-126


def bits(value):
    """float32 lanes as uint32."""
    return T.reinterpret(value, "uint32x64")


def real(value):
    """uint32 lanes as float32."""
    return T.reinterpret(value, "float32x64")


@T.macro
def magnitude(value):
    """Bits of |x|: as integers they order numbers, infinity and NaN."""
    word = bits(value)
    return S.vand(word, S.vdup(T.uint32(0x7FFFFFFF), "uint32"))


@T.macro
def exponent_up(value):
    """UE8M0 byte of the smallest power of two not below a value that is not negative: 255 for infinity and NaN."""
    word = bits(value)
    raised = S.vadd(word, S.vdup(T.uint32(MANTISSA), "uint32"))
    return S.vmins(S.vshrs(raised, 23), T.uint32(255))


@T.macro
def power_reciprocal(exponent):
    """2^(127 - e) of exponents 1 to 253; NaN of 255."""
    word = S.vshls(S.vsub(S.vdup(T.uint32(254), "uint32"), exponent), 23)
    nothing = S.vcmps(exponent, T.uint32(255), op="eq")
    return real(S.vsel(S.vdup(T.uint32(NAN), "uint32"), word, nothing))


@T.macro
def clamped(value, limit, nan):
    """A value within +-limit; `nan` (bits) where it is NaN."""
    lost = S.vcmp(value, value, op="ne")
    inside = S.vmaxs(S.vmins(value, limit), -limit)
    return S.vsel(real(S.vdup(T.uint32(nan), "uint32")), inside, lost)


@T.macro
def odd_bf16(value):
    """The upper half of a float32, its last bit set if anything was cut off: rounding it again cannot go wrong."""
    word = bits(value)
    sticky = S.vmins(S.vand(word, S.vdup(T.uint32(0xFFFF), "uint32")), T.uint32(1))
    return S.vor(S.vshrs(word, 16), sticky)


@T.macro
def e2m1_bytes(even, odd):
    """Codes of 128 values: one byte in each 32-bit lane, for a store with PK4_B32. Ties to even codes; NaN gives 0."""
    low = odd_bf16(clamped(even, 6.0, 0))
    high = odd_bf16(clamped(odd, 6.0, 0))
    both = S.vor(low, S.vshls(high, 16))
    code = S.vcvt(T.reinterpret(both, "bfloat16x128"), "float4_e2m1fn", part=0)
    return T.reinterpret(code, "uint8x256")


@T.macro
def e4m3_bytes(even, odd):
    """Codes of 128 values: two bytes in each 32-bit lane, for a store with PK_B32. Saturates; NaN gives 0x7F."""
    low = S.vcvt(clamped(even, 448.0, NAN), "float8_e4m3fn", part=0)
    high = S.vcvt(clamped(odd, 448.0, NAN), "float8_e4m3fn", part=1)
    return S.vor(T.reinterpret(low, "uint32x64"), T.reinterpret(high, "uint32x64"))


@T.macro
def group_tops(even, odd):
    """Largest magnitude of each of 8 groups of 16 values, in the first 8 lanes, float32 (NaN above infinity)."""
    top = S.vmax(magnitude(even), magnitude(odd))
    return real(S.vcgmax(top))


@T.macro
def main_scale(top):
    """E4M3 scales of groups of 16 (byte 0 of each lane) from the groups' tops."""
    floor = S.vdup(MAIN_FLOOR, T.float32)
    most = real(S.vmax(bits(top), bits(floor)))
    return S.vcvt(S.vdiv(most, S.vdup(6.0, T.float32), precision="exact"), "float8_e4m3fn", part=0)


@T.macro
def power_exponent(top, floor, largest):
    """UE8M0 bytes (as uint32) of groups of 32 values from the tops of 16: even and odd lanes are halves of a group."""
    even, odd = S.vdintlv(bits(top), bits(top))
    least = S.vdup(T.float32(floor), T.float32)
    most = real(S.vmax(S.vmax(even, odd), bits(least)))
    return exponent_up(S.vdiv(most, S.vdup(T.float32(largest), T.float32), precision="exact"))


# A format's group, and of UE8M0 scales the floor of amax and the largest code.
_POWER = {"window": (WINDOW_FLOOR, 448.0), "index": (INDEX_FLOOR, 6.0)}


@T.macro
def quantise_rows(y, rows, D, format, tops, inverse, codes, scales, scale_at):
    """Quantise `rows` rows of D values in y; a barrier has to stand before it if y was just written.

    tops, inverse: float32 [.., D / 16 and more], room. codes: uint8 rows from column 0. scales: uint8 rows from column
    `scale_at`, a multiple of 32 as rows of both are; it may be the same buffer as codes.
    """
    eight = S.pset(32, "PAT_VL8")
    for r in T.serial(T.uint16(rows)):
        for c in T.serial(T.uint16(D // 128)):
            even, odd = S.vld2(y[r, c * 128], dist="DINTLV_B32")
            S.vsts(tops[r, c * 8], group_tops(even, odd), eight, dist="NORM_B32", extent=8)
    S.mem_bar("VST_VLD")
    for r in T.serial(T.uint16(rows)):
        for p in T.serial(T.uint16(-(-D // 1024))):  # 64 groups of 16 at a time
            top = S.vld(tops[r, p * 64])
            if format == "main":
                kept = S.update_mask(T.uint32(min(64, D // 16)), 32)
                scale = main_scale(top)
                S.vsts(scales[r, scale_at + p * 64], T.reinterpret(scale, "uint8x256"), kept, dist="PK4_B32",
                       extent=min(64, D // 16))  # fmt: skip
                decoded = S.vcvt(scale, T.float32, part=0)
                S.vsts(inverse[r, p * 64], S.vdiv(S.vdup(1.0, T.float32), decoded, precision="exact"))
            else:
                half = S.update_mask(T.uint32(min(32, D // 32)), 32)
                exponent = power_exponent(top, *_POWER[format])
                S.vsts(scales[r, scale_at + p * 32], T.reinterpret(exponent, "uint8x256"), half, dist="PK4_B32",
                       extent=min(32, D // 32))  # fmt: skip
                once = power_reciprocal(exponent)
                twice, _rest = S.vintlv(once, once)
                S.vsts(inverse[r, p * 64], twice)
    S.mem_bar("VST_VLD")
    for r in T.serial(T.uint16(rows)):
        for c in T.serial(T.uint16(D // 128)):
            even, odd = S.vld2(y[r, c * 128], dist="DINTLV_B32")
            factor = S.vld(inverse[r, c * 8], dist="E2B_B32")
            if format == "window":
                S.vsts(codes[r, c * 128], e4m3_bytes(S.vmul(even, factor), S.vmul(odd, factor)), dist="PK_B32",
                       extent=128)  # fmt: skip
            else:
                S.vsts(codes[r, c * 64], e2m1_bytes(S.vmul(even, factor), S.vmul(odd, factor)), dist="PK4_B32",
                       extent=64)  # fmt: skip


@T.macro
def norm_rows(y, rows, D, w, eps):
    """y = y / sqrt(mean(y²) + eps) · w, in place, for D a multiple of 64; ends with a barrier."""
    for r in T.serial(T.uint16(rows)):
        squares = S.alloc_var(T.float32)
        squares = S.vdup(0.0, T.float32)
        for c in T.serial(T.uint16(D // 64)):
            v = S.vld(y[r, c * 64])
            squares = S.vadd(squares, S.vmul(v, v))
        mean = S.vdiv(S.vdupv(S.vcadd(squares)), S.vdup(T.float32(D), T.float32), precision="exact")
        root = S.vsqrt(S.vadds(mean, eps), precision="ftz_false")
        factor = S.vdiv(S.vdup(1.0, T.float32), root, precision="exact")
        for c in T.serial(T.uint16(D // 64)):
            v = S.vmul(S.vmul(S.vld(y[r, c * 64]), factor), S.vld(w[c * 64]))
            S.vsts(y[r, c * 64], v)
    S.mem_bar("VST_VLD")


@T.macro
def round_bf16(y, rows, first, D):
    """Columns first to D of y to bfloat16 and back, in place; ends with a barrier."""
    for r in T.serial(T.uint16(rows)):
        for c in T.serial(T.uint16((D - first) // 64)):
            v = S.vcvt(S.vcvt(S.vld(y[r, first + c * 64]), T.bfloat16), T.float32)
            S.vsts(y[r, first + c * 64], v)
    S.mem_bar("VST_VLD")


@T.macro
def turn_rows(y, rows, D, turns):
    """Rotate adjacent pairs of the last 64 of D channels by turns [.., 32 cosines, 32 sines]; ends with a barrier."""
    other = S.vxor(T.reinterpret(S.vci(0, T.int32), "uint32x64"), S.vdup(T.uint32(32), T.uint32))
    for r in T.serial(T.uint16(rows)):
        v = S.vld(y[r, D - 64])
        a, b = S.vdintlv(v, v)
        cosine = S.vld(turns[r, 0])
        sine = S.vselr(cosine, other)
        first = S.vsub(S.vmul(a, cosine), S.vmul(b, sine))
        second = S.vadd(S.vmul(a, sine), S.vmul(b, cosine))
        turned, _rest = S.vintlv(first, second)
        S.vsts(y[r, D - 64], turned)
    S.mem_bar("VST_VLD")

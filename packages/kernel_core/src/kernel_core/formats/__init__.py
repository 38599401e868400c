"""Stored number formats in plain PyTorch: the semantics that every native codec is held to, bit by bit.

Element codes (`elements`), cache rows and index pages (`rows`), packed weights (`weights`). All encoders take
any float dtype, compute in float32 and return bytes; all decoders return float32. `kernel_core.native_formats`
holds the C++ twins.
"""

from kernel_core.formats.elements import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_nibbles,
    unpack_nibbles,
)
from kernel_core.formats.pages import (
    index_page_from_rows,
    index_page_rows,
    join_index_page,
    split_index_page,
)
from kernel_core.formats.rows import (
    dequantize_index,
    dequantize_main,
    dequantize_window,
    index_row_bytes,
    index_row_width,
    main_row_bytes,
    main_row_width,
    quantize_index,
    quantize_main,
    quantize_window,
    window_row_bytes,
    window_row_width,
)
from kernel_core.formats.weights import (
    dequantize_fp8_block,
    dequantize_fp8_rows,
    dequantize_mxfp4,
    quantize_fp8_block,
    quantize_fp8_rows,
    quantize_mxfp4,
)

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "dequantize_fp8_block",
    "dequantize_fp8_rows",
    "dequantize_index",
    "dequantize_main",
    "dequantize_mxfp4",
    "dequantize_window",
    "encode_e2m1",
    "encode_e4m3",
    "encode_ue8m0",
    "index_page_from_rows",
    "index_page_rows",
    "index_row_bytes",
    "index_row_width",
    "join_index_page",
    "main_row_bytes",
    "main_row_width",
    "pack_nibbles",
    "quantize_fp8_block",
    "quantize_fp8_rows",
    "quantize_index",
    "quantize_main",
    "quantize_mxfp4",
    "quantize_window",
    "split_index_page",
    "unpack_nibbles",
    "window_row_bytes",
    "window_row_width",
]

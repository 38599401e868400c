"""The ops on an NVIDIA GPU: tensors to the pointers and sizes of the compiled module, one file as in `mla_fp4.ops`.

Arguments come checked by the ops. A function `fits_...` says whether a kernel takes these shapes; where none does, the
op runs PyTorch's operators (`mla_fp4.library`). Nothing here waits for the device, so that CUDA graphs can hold it.
"""

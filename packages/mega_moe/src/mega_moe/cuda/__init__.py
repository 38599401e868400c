"""The ops on an NVIDIA GPU: tensors to the pointers and sizes of the compiled module."""

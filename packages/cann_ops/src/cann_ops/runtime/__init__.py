"""Running kernels on an Ascend 950: what is missing, compiled binaries, and the launch. Never run on a device."""

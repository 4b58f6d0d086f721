"""The check of the Metal kernels on an NVIDIA GPU: `python -m tests.kernels.cuda.gpu_check`."""

MODULE = __name__

"""The Metal kernels on NVIDIA GPUs: translates their sources to CUDA C++ and compiles them by NVRTC."""

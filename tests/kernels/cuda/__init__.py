"""Tests of the Metal kernels as CUDA C++."""

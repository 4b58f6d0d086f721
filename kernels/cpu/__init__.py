"""Operations for CPUs in C++; what has no C++ kernel is computed by the reference (plain torch)."""

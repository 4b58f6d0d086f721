"""Operations for CPUs in C++; what is not here, the reference does."""

"""Metal kernels, and an emulator that runs them on any machine with a C++ compiler."""

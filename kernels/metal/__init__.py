"""Metal kernels. The emulator that runs them on any machine with a C++ compiler is a package of its own."""

"""Metal kernels, run by the emulator."""

"""The formats in which weights are stored: safetensors of MLX, GGUF, and quantised copies of our own."""

"""The formats in which weights are stored: safetensors of MLX, GGUF, and quantized copies of our own."""

"""Readers of weight formats: GGUF, MLX's safetensors, and kvmux's own cache of quantized weights."""

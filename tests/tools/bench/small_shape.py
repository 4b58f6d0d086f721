"""A shape small enough for tests."""

from tools.bench.models import ModelShape

SMALL_SHAPE = ModelShape("small", "Qwen2ForCausalLM", "qwen2", 2, 128, 192, 4, 2, 700, 512, 1e4, qkv_bias=True)

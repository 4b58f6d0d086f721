"""`make validate`: validates kvmux against llama.cpp, with the same GGUF files, texts and tokens."""

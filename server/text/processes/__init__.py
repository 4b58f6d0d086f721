"""The processes that run a model's own tokenizer and chat template within limits."""

"""Tool calls and reasoning in a model's text: by family, from pieces of the text as they arrive."""

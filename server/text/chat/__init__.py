"""Conversations become prompts: chat templates, the form in which they take calls, special tokens in messages."""

"""Trains the small model that the server ships with: tokenizer, training and export.

The server does not import this package. corpus/ generates the text that the model learns from; write_texts.py writes
the part of it that `kvmux evaluate` reads.
"""

"""Trains the small model that the server ships with: tokenizer, training and export.

The server does not import this package; the corpus is in server/evaluation/corpus.
"""

"""Makes the small model that the server ships with: its corpus, its tokenizer, its training and its export.

Nothing in the rest of the server imports this package.
"""

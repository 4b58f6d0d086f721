"""The promises of scorers (`promises.py`), and what they are checked with."""

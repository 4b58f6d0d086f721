"""The board of `kvmux evaluate --board`: strategies x suites x lengths, as JSON, a table and one HTML page.

`data.py` has what is measured, and its file; `speed.py` and `runner.py` measure it; `verdicts.py` says what follows
from it; `page.py` shows it. Only the runner and `speed.py` know the engine.
"""

"""Checks whether a third party's strategy or scorer keeps its promises, and writes new ones: `kvmux strategy`.

`promise.py` says what a promise is; `strategies` and `scorers` have those of each kind of class, and `driver` runs
texts through caches. `cases.py` lists what is checked, for the command line (`command.py`) and for pytest
(`pytest_plugin.py`, `test_promises.py`). The server imports none of it.
"""

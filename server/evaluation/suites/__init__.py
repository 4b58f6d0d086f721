"""Suites of tasks for `kvmux evaluate --suite`: generated texts with questions, and paired comparisons of the answers.

A task draws samples and scores answers (`task.py`); `registry.py` lists the tasks. A sample becomes prompts in
`prompts.py`, which `runner.py` gives to the engine under each strategy. `paired.py` has the statistics.
"""

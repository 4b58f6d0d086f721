"""Ways to keep keys and values: the seam (`base.py`), the strategies behind it, and the registry that finds them.

Imports `kernels` and `config`; knows no model, no scheduler and no HTTP.
"""

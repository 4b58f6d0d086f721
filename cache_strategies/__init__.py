"""KV-cache strategies: their interface (`base.py`), the strategies that implement it, and their registry.

Imports `kernels` and `config`; knows no model, no scheduler and no HTTP.
"""

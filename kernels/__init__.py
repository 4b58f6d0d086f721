"""Operations on tensors and KV memory: their interface, their definition in plain torch, and faster backends.

Imports torch and, of this project, only `config`. Not related to Hugging Face's package `kernels`.
"""

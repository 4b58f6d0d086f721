"""Operations on tensors and KV memory: their interface, their meaning in plain torch, and faster backends.

Imports torch and, of this project, only `config`. Not Hugging Face's package of the same name.
"""

"""Operations on tensors and the KV memory they read: the op table, its plain-torch specification, backends.

Imports torch and nothing of this project but `config`. Not Hugging Face's package of the same name.
"""

"""Operations on tensors and the KV memory they read: what they are called, and what they mean in plain torch.

Imports torch, and of this project at most `config`. Not Hugging Face's package of the same name.
"""

"""A textbook KV cache: the idea in one file, to read first. Knows neither the server nor its strategies and kernels.

A decoder computes a key and a value for every token in every layer. In causal attention they never change afterwards,
so they are computed once and kept. A new token then costs the work of one token instead of that of the whole text:

    keys of one layer  [B, H, max_seq_len, D]      | token 0 | token 1 | ... | token S-1 |   free   |
                                                     `--- what get() and update() show --'  ^ update() writes here

The file also has attention that uses the cache (`CausalAttentionWithCache`) and a small GPT (`GPTWithCache`). Both also
work without a cache, more slowly and with the same results, to compare with.

Letters in shapes: B sequences, H heads, D dimensions of a head, S tokens so far, n tokens that enter now.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class KVCache:
    """Keys and values of B sequences of equal length, for any number of layers, in one dtype.

    A layer's memory is allocated once, for max_seq_len tokens, when the layer is first used. New tokens are copied in,
    without gradients. get() and update() return views of that memory, so nothing else is copied or allocated per token.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seq_len: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Set the sizes of each layer's memory and its dtype: float32, float16 or bfloat16. Allocates nothing yet.

        Raises ValueError if a size is less than 1, or if the dtype is not a floating-point type.
        """
        sizes = (max_batch_size, max_seq_len, num_heads, head_dim)
        if min(sizes) < 1:
            raise ValueError(
                f"max_batch_size, max_seq_len, num_heads and head_dim are {sizes}: each must be at least 1"
            )
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}: keys and values need a floating-point type, such as torch.bfloat16")
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.dtype = dtype
        # K and V by layer, each [max_batch_size, H, max_seq_len, D]
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._filled: dict[int, tuple[int, int]] = {}  # (sequences B, tokens S) stored so far, by layer

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append n tokens to a layer: key and value [B, H, n, D] -> views of K and V [B, H, S + n, D].

        B may be less than max_batch_size, but must be the same in all updates of a layer until clear().
        Raises ValueError, and stores nothing, if the tokens do not fit or have another shape or dtype.
        """
        self._check(key, value, layer_idx)
        if layer_idx not in self._memory:
            self._memory[layer_idx] = self._allocate(key.device), self._allocate(key.device)
        batch, n = key.shape[0], key.shape[2]
        start = self.length(layer_idx)
        for memory, new in zip(self._memory[layer_idx], (key, value), strict=True):
            memory[:batch, :, start : start + n].copy_(new.detach())
        self._filled[layer_idx] = batch, start + n
        return self.get(layer_idx)

    def get(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return views of K and V [B, H, S, D] of a layer. Raises ValueError if the layer was never updated."""
        if layer_idx not in self._memory:
            raise ValueError(f"layer {layer_idx} holds no tokens yet: call update() first")
        batch, length = self._filled[layer_idx]
        k, v = self._memory[layer_idx]
        return k[:batch, :, :length], v[:batch, :, :length]

    def crop(self, length: int) -> None:
        """Drop the tokens from position `length` on, in every layer, such as rejected draft tokens.

        Layers that hold at most `length` tokens stay as they are. Raises ValueError if `length` is negative.
        """
        if length < 0:
            raise ValueError(f"crop({length}): give the number of tokens to keep, 0 or more")
        self._filled = {layer: (batch, min(held, length)) for layer, (batch, held) in self._filled.items()}

    def clear(self) -> None:
        """Drop all tokens of all layers; keep the allocated memory for the next text."""
        self._filled = dict.fromkeys(self._memory, (0, 0))

    # ---------------------------------------------------------------- sizes
    def length(self, layer_idx: int) -> int:
        """Return S, the number of tokens in a layer; 0 for a layer that was never updated."""
        return self._filled.get(layer_idx, (0, 0))[1]

    def __len__(self) -> int:
        """Return the number of tokens that every updated layer holds. Like an empty list, an empty cache is false."""
        return min((length for _, length in self._filled.values()), default=0)

    @property
    def nbytes(self) -> int:
        """The bytes of memory allocated so far, for all layers that were updated."""
        return sum(k.nbytes + v.nbytes for k, v in self._memory.values())

    @staticmethod
    def bytes_for(
        num_layers: int, batch_size: int, seq_len: int, num_heads: int, head_dim: int, itemsize: int = 4
    ) -> int:
        """Return the bytes that the keys and values of all layers take; `itemsize` is the bytes of one number."""
        return 2 * num_layers * batch_size * num_heads * seq_len * head_dim * itemsize

    # ---------------------------------------------------------------- details
    def _allocate(self, device: torch.device) -> Tensor:
        sizes = (self.max_batch_size, self.num_heads, self.max_seq_len, self.head_dim)
        # leave inference mode, as tensors allocated in it cannot be written outside of it
        with torch.inference_mode(False):
            return torch.zeros(sizes, dtype=self.dtype, device=device)

    def _check(self, key: Tensor, value: Tensor, layer_idx: int) -> None:
        """Raise ValueError if new keys and values do not fit into the cache; the message says what to change."""
        for name, x in (("key", key), ("value", value)):
            if x.dim() != 4 or (x.shape[1], x.shape[3]) != (self.num_heads, self.head_dim):
                expected = f"[batch, {self.num_heads}, tokens, {self.head_dim}]"
                raise ValueError(
                    f"{name} has the shape {list(x.shape)}, this cache needs {expected}: "
                    "change the shape, or make the cache with other num_heads and head_dim"
                )
            if x.dtype != self.dtype:
                raise ValueError(
                    f"{name} has dtype {x.dtype}, this cache stores {self.dtype}: make the cache with dtype={x.dtype}"
                )
        if key.shape != value.shape or key.device != value.device:
            raise ValueError(
                f"key {list(key.shape)} on {key.device} and value {list(value.shape)} on {value.device} "
                "differ: give both the same shape and device"
            )
        batch, n, start = key.shape[0], key.shape[2], self.length(layer_idx)
        if batch > self.max_batch_size:
            raise ValueError(f"{batch} sequences exceed max_batch_size={self.max_batch_size}: raise it")
        if start and batch != self._filled[layer_idx][0]:
            raise ValueError(
                f"layer {layer_idx} holds {self._filled[layer_idx][0]} sequences, and the new tokens are from {batch}: "
                "keep the batch size, or call clear() first"
            )
        if start + n > self.max_seq_len:
            raise ValueError(
                f"layer {layer_idx} holds {start} tokens and has no room for {n} more: "
                f"raise max_seq_len={self.max_seq_len}, or call clear() first"
            )
        if layer_idx in self._memory and key.device != self._memory[layer_idx][0].device:
            raise ValueError(
                f"layer {layer_idx} is on {self._memory[layer_idx][0].device}, its new keys are on {key.device}: "
                "move them to the same device"
            )


class CausalAttentionWithCache(nn.Module):
    """Multi-head self-attention of one layer, whose keys and values go through a KVCache.

    Prefill and decode are the same call with different n: it appends the new tokens' keys and values to the cache, then
    each new query attends to all keys up to its own. Earlier tokens are not computed again. Without a cache, `x` must
    be the whole text, and gradients flow through all of it.
    """

    def __init__(self, d_model: int, num_heads: int, layer_idx: int, *, bias: bool = True) -> None:
        """Make the layer with index `layer_idx`. Raises ValueError if d_model is not a multiple of num_heads."""
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of num_heads={num_heads}: change one of them")
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.layer_idx = layer_idx
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)  # queries, keys and values of all heads side by side
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, x: Tensor, cache: KVCache | None = None, start_pos: int = 0) -> Tensor:
        """Compute attention for x [B, n, d_model], at positions start_pos to start_pos + n - 1 -> [B, n, d_model].

        Raises ValueError if start_pos is not the number of tokens in the cache's layer (0 without a cache).
        """
        held = 0 if cache is None else cache.length(self.layer_idx)
        if start_pos != held:
            raise ValueError(_format_start_pos_error(start_pos, held, self.layer_idx, cache))
        B, n, d_model = x.shape
        # [B, n, 3 d_model] -> queries, keys and values, each [B, H, n, D]
        q, keys, values = self.qkv(x).view(B, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)  # [B, H, S, D] with S = start_pos + n

        # scores [B, H, n, S]; q is divided first, since the product could exceed 65504, the largest float16
        scores = (q / math.sqrt(self.head_dim)) @ keys.transpose(-2, -1)
        # Query i is at position start_pos + i and attends to keys 0 to start_pos + i: a causal mask.
        seen = torch.ones(n, start_pos + n, dtype=torch.bool, device=x.device).tril(start_pos)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        mixed = (weights @ values).transpose(1, 2).reshape(B, n, d_model)  # concatenate the heads
        projected: Tensor = self.out(mixed)
        return projected


def _format_start_pos_error(start_pos: int, held: int, layer_idx: int, cache: KVCache | None) -> str:
    """Return the error message for a start_pos that differs from `held`, the number of tokens in the cache."""
    if cache is None:
        return f"start_pos is {start_pos}, but there is no cache: pass the whole text and start_pos=0, or a cache"
    return (
        f"start_pos is {start_pos}, but the cache holds {held} tokens of layer {layer_idx}: "
        f"pass start_pos={held}, or call clear() to begin a new text"
    )


class Block(nn.Module):
    """One layer of the GPT: attention over the tokens, then an MLP on each token alone."""

    def __init__(self, d_model: int, num_heads: int, layer_idx: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = CausalAttentionWithCache(d_model, num_heads, layer_idx)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor, cache: KVCache | None = None, start_pos: int = 0) -> Tensor:
        """Return x plus the outputs of attention and of the MLP: [B, n, d_model] -> [B, n, d_model]."""
        x = x + self.attention(self.norm_1(x), cache, start_pos)
        mixed: Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class GPTWithCache(nn.Module):
    """A small GPT with learned position embeddings."""

    def __init__(self, vocab_size: int, d_model: int, num_heads: int, num_layers: int, max_seq_len: int) -> None:
        """Make the GPT with random weights. Raises ValueError if d_model is not a multiple of num_heads."""
        super().__init__()
        self.num_heads, self.head_dim, self.max_seq_len = num_heads, d_model // num_heads, max_seq_len
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_seq_len, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads, layer_idx) for layer_idx in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def new_cache(self, batch_size: int) -> KVCache:
        """Return an empty cache for `batch_size` texts of up to max_seq_len tokens, in the dtype of the weights."""
        return KVCache(batch_size, self.max_seq_len, self.num_heads, self.head_dim, self.head.weight.dtype)

    def forward(self, ids: Tensor, cache: KVCache | None = None, start_pos: int = 0) -> Tensor:
        """Compute logits [B, n, vocab_size] for ids [B, n] at positions start_pos to start_pos + n - 1.

        Raises ValueError if the text becomes longer than max_seq_len, or if start_pos is not the number of tokens in
        the cache.
        """
        end = start_pos + ids.shape[1]
        if end > self.max_seq_len:
            raise ValueError(
                f"a text of {end} tokens is longer than max_seq_len={self.max_seq_len}: pass a shorter one"
            )
        x = self.tokens(ids) + self.positions(torch.arange(start_pos, end, device=ids.device))
        for block in self.blocks:
            x = block(x, cache, start_pos)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.inference_mode()
    def generate(self, prompt: Tensor, num_tokens: int, cache: KVCache | None = None) -> Tensor:
        """Append num_tokens tokens by greedy decoding: prompt [B, n] -> [B, n + num_tokens].

        With a cache the prompt enters first, and then one token per step. Without one the whole text enters in every
        step, which gives the same tokens with more work. Raises ValueError for an empty prompt, and if the text becomes
        longer than max_seq_len.
        """
        if not prompt.shape[1]:
            raise ValueError("the prompt is empty: pass at least one token")
        text = new = prompt
        for _ in range(num_tokens):
            logits = self(text) if cache is None else self(new, cache, start_pos=len(cache))
            new = logits[:, -1:].argmax(-1)
            text = torch.cat((text, new), dim=1)
        return text

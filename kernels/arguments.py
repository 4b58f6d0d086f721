"""Checks that the types and sizes of each operation's arguments fit each other; raises ValueError if they do not.

An operation checks once, before any memory is read. The reference and the Metal kernels do so with these functions, the
C++ kernels with those in `kernels/cpu/arguments.h`. The contents of the block table and the positions of rows are not
checked. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.ops import AttentionWeights, Packed
from kernels.quantization import Quantized
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots

ANY, SOME = -1, -2  # a size of 0 or more; a size of 1 or more
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def expect(holds: bool, words: str, *values: object) -> None:
    """Raise ValueError unless `holds`; `values` replace the {} of the message, formatted only when it is needed."""
    if not holds:
        raise ValueError(words.format(*(list(value) if isinstance(value, torch.Size) else value for value in values)))


def expect_tensor(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless a tensor has these sizes, one of these dtypes and, if given, is on this device."""
    if not _fits(tensor.shape, sizes) or tensor.dtype not in dtypes or (device is not None and tensor.device != device):
        raise ValueError(_words(operation, name, tensor, sizes, dtypes, device))


def _fits(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a shape has these sizes; a plain loop, as this runs before every operation."""
    if len(shape) != len(sizes):
        return False
    for n, size in zip(shape, sizes, strict=True):  # noqa: SIM110
        if n != size and (size >= 0 or n < ANY - size):
            return False
    return True


def _words(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> str:
    """Return a message that says what the tensor must be and what it is."""
    wanted = ", ".join({ANY: "any", SOME: "at least 1"}.get(size, str(size)) for size in sizes)
    types = " or ".join(_name(dtype) for dtype in dict.fromkeys(dtypes))
    where = "" if device is None else f" on {device}"
    found = f"{_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
    return f"{operation}: {name} must be {types} [{wanted}]{where}, and is {found}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -------------------------------------------------------------------- layers
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check the arguments of `Ops.linear`."""
    expect_tensor("linear", "weight", weight, (SOME, SOME))
    expect_tensor("linear", "x", x, (ANY, weight.shape[1]), device=weight.device)
    if bias is not None:
        expect_tensor("linear", "bias", bias, weight.shape[:1], (weight.dtype,), weight.device)


def quantized_linear(x: Tensor, weight: Quantized | Packed, bias: Tensor | None) -> None:
    """Check the arguments of `Ops.quantized_linear`; the parts of the weight were checked when it was made."""
    outputs, inputs = weight.shape
    expect_tensor("quantized_linear", "x", x, (ANY, inputs), device=weight.device)
    if bias is not None:
        expect_tensor("quantized_linear", "bias", bias, (outputs,), device=weight.device)


def enter_attention(layer: AttentionWeights, x: Tensor, positions: Tensor) -> None:
    """Check those arguments of `Ops.enter_attention` that the operations it calls do not check."""
    expect(len(layer.qkv.shape) == 2, "enter_attention: qkv must be [out, in], and is {}", layer.qkv.shape)
    if layer.tables is not None:
        expect_tensor("enter_attention", "cos", layer.tables[0], (ANY, SOME), (torch.float32,), x.device)
    heads, outputs = layer.q_heads + 2 * layer.kv_heads, layer.qkv.shape[0]
    expect(
        layer.q_heads > 0 and layer.kv_heads > 0 and outputs > 0 and outputs % heads == 0,
        "enter_attention: qkv has {} outputs, which are not {} query heads and twice {} heads of one dimension",
        *(outputs, layer.q_heads, layer.kv_heads),
    )
    expect_tensor("enter_attention", "positions", positions, x.shape[:1], (torch.int64,), x.device)


def rms_norm(x: Tensor, weight: Tensor, operation: str = "rms_norm") -> None:
    """Check the arguments of `Ops.rms_norm`."""
    expect_tensor(operation, "x", x, (ANY, SOME))
    expect_tensor(operation, "weight", weight, x.shape[1:], device=x.device)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor) -> None:
    """Check the arguments of `Ops.add_rms_norm`."""
    rms_norm(x, weight, "add_rms_norm")
    expect_tensor("add_rms_norm", "delta", delta, x.shape, (x.dtype,), x.device)


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Check the arguments of `Ops.rope`, except the values of positions: these lie on the device."""
    expect_tensor("rope", "x", x, (ANY, SOME, SOME))
    N, _, D = x.shape
    expect(D % 2 == 0, "rope: x must have heads of an even dimension, and is {}", x.shape)
    expect_tensor("rope", "cos", cos, (ANY, D // 2), (torch.float32,), x.device)
    expect_tensor("rope", "sin", sin, cos.shape, (torch.float32,), x.device)
    expect_tensor("rope", "positions", positions, (N,), (torch.int64,), x.device)


def silu_mul(gate_up: Tensor, operation: str = "silu_mul") -> None:
    """Check the argument of `Ops.silu_mul`, or of an operation with another activation."""
    expect_tensor(operation, "gate_up", gate_up, (ANY, SOME))
    words = "{}: gate_up must be two halves of one width, and is {}"
    expect(gate_up.shape[1] % 2 == 0, words, operation, gate_up.shape)


def sample(logits: Tensor, how: Tensor) -> None:
    """Check the arguments of `Ops.sample`."""
    expect_tensor("sample", "logits", logits, (ANY, SOME))
    expect_tensor("sample", "how", how, (len(logits), 5), (torch.float64,), torch.device("cpu"))


def repeat_kv_heads(x: Tensor, groups: int) -> None:
    """Check the arguments of `Ops.repeat_kv_heads`."""
    expect_tensor("repeat_kv_heads", "x", x, (ANY, SOME, SOME))
    expect(0 < groups < 1 << 20, "repeat_kv_heads: there must be at least one group, not {}", groups)


def repeat_kv_heads_step(mirror: Tensor, x: Tensor, start: int) -> None:
    """Check the arguments of `Ops.repeat_kv_heads_step`."""
    expect_tensor("repeat_kv_heads_step", "x", x, (ANY, SOME, SOME))
    n, H, D = x.shape
    expect_tensor("repeat_kv_heads_step", "mirror", mirror, (SOME, ANY, D), (x.dtype,), x.device)
    heads, columns, _ = mirror.shape
    expect(heads % H == 0, "repeat_kv_heads_step: {} heads of the mirror are not a multiple of {}", heads, H)
    expect(0 <= start <= columns - n, "repeat_kv_heads_step: no columns {} + {} of {}", start, n, columns)


# -------------------------------------------------------------------- KV memory
def quantize(x: Tensor) -> None:
    """Check the argument of `Ops.quantize`."""
    expect(x.dim() > 0 and x.shape[-1] > 0, "quantize: x must be vectors, and is {}", x.shape)
    expect_tensor("quantize", "x", x, x.shape)


def dequantize(x: Tensor, scale: Tensor) -> None:
    """Check the arguments of `Ops.dequantize`."""
    expect(x.dim() > 0 and x.shape[-1] > 0, "dequantize: x must be vectors, and is {}", x.shape)
    expect_tensor("dequantize", "x", x, x.shape, (torch.int8,))
    expect_tensor("dequantize", "scale", scale, x.shape[:-1], device=x.device)


def write_kv(store: KVStore, layer: int, k: Tensor, v: Tensor) -> None:
    """Check the arguments of `Ops.write_kv`, without its addresses."""
    H, D, Dv = store.heads(layer)
    device = store.device
    expect_tensor("write_kv", "k", k, (ANY, H, D), device=device)
    expect_tensor("write_kv", "v", v, (len(k), H, Dv), (k.dtype,), device)


def attend(out: Tensor, q: Tensor, store: KVStore, layer: int, spec: LayerSpec, window: int | None) -> None:
    """Check the arguments of `Ops.attend`, without its addresses."""
    H, D, Dv = store.heads(layer)
    heads, device = spec.num_q_heads, store.device
    expect(
        (spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (H, D, Dv) and heads > 0 and heads % H == 0,
        "attend: {} does not fit a store of {} heads of {} and {}",
        *(spec, H, D, Dv),
    )
    expect(
        (spec.window is None or spec.window > 0) and (window is None or window > 0),
        "attend: a window must have a token at least, not {} or {}",
        *(spec.window, window),
    )
    expect_tensor("attend", "q", q, (ANY, heads, D), device=device)
    expect_tensor("attend", "out", out, (len(q), heads, Dv), (q.dtype,), device)
    if spec.sink_logits is not None:
        expect_tensor("attend", "sink_logits", spec.sink_logits, (heads,), device=device)


def gather(store: KVStore, layer: int, at: Slots, row: int, positions: Tensor) -> None:
    """Check the arguments of `Ops.gather`, except its addresses, which were checked before."""
    store.heads(layer)
    expect(0 <= row < at.num_rows, "gather: there is no row {} among {}", row, at.num_rows)
    whole = torch.int64, torch.int32
    expect_tensor("gather", "positions", positions, (ANY,), whole, store.device)


def copy_blocks(store: KVStore, src: Sequence[int], dst: Sequence[int]) -> None:
    """Check the arguments of `Ops.copy_blocks`."""
    expect(len(src) == len(dst), "copy_blocks: {} blocks cannot become {}", len(src), len(dst))
    inside = all(0 <= block < store.num_blocks for block in (*src, *dst))
    expect(inside, "copy_blocks: there are blocks from 0 to {} only", store.num_blocks - 1)
    written = set(dst)  # on a device all blocks are copied at the same time
    once = len(written) == len(dst) and written.isdisjoint(src)
    expect(once, "copy_blocks: a block is written twice, or read and written; copy it in another call")


class Addresses:
    """Checks the addresses of a step once: all layers share them."""

    def __init__(self) -> None:
        self._tokens: WeakKeyDictionary[Slots, tuple[KVStore, int]] = WeakKeyDictionary()

    def expect(self, operation: str, at: Slots, store: KVStore, tokens: int | None = None) -> None:
        """Raise ValueError unless addresses fit each other, the store and, if given, the tokens that entered."""
        found = self._tokens.get(at)
        if found is None or found[0] is not store:
            found = self._tokens[at] = store, _tokens(operation, at, store)
        if tokens is not None and found[1] > tokens:
            raise ValueError(f"{operation}: rows of {found[1]} tokens, of which {tokens} entered")


def _tokens(operation: str, at: Slots, store: KVStore) -> int:
    """Check a step's addresses; return the number of tokens in its rows, or 0 on a device, so as not to wait for it."""
    device, whole = store.device, (torch.int32,)
    expect_tensor(operation, "start", at.start, (ANY,), whole, device)
    rows = at.num_rows
    expect_tensor(operation, "table", at.table, (SOME, SOME), whole, device)
    expect_tensor(operation, "row_seat", at.row_seat, (rows,), whole, device)
    expect_tensor(operation, "q_start", at.q_start, (rows + 1,), whole, device)
    expect(
        at.block_size == store.block_size and at.sinks >= 0 and at.ring >= 0 and 0 <= at.num_decode <= rows,
        "{}: blocks of {} slots, {} sinks, a ring of {} and {} rows of one token do not fit a store of {} and {} rows",
        *(operation, at.block_size, at.sinks, at.ring, at.num_decode, store.block_size, rows),
    )
    return int(at.q_start[-1]) if device.type == "cpu" else 0

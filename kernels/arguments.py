"""Checks of a tensor's type and size and of a step's addresses; each operation builds its own checks from these.

A failed check raises ValueError with a message that says what is required and what was found. Knows no operation and no
backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.store import KVStore
from kernels.types import Slots

MAX_INDEX = (1 << 31) - 1  # of a token, as addresses are int32
ANY, AT_LEAST_ONE = -1, -2  # in `sizes`: a dimension of any size; a dimension of size 1 or more
FLOATS: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(holds: bool, message: str, *values: object) -> None:
    """Raise ValueError unless `holds`. The values replace the {} of the message, which is formatted only on failure."""
    if not holds:
        raise ValueError(message.format(*(list(value) if isinstance(value, torch.Size) else value for value in values)))


def check_tensor(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless a tensor has these sizes, one of these dtypes and, if one is given, this device."""
    if (
        not _has_sizes(tensor.shape, sizes)
        or tensor.dtype not in dtypes
        or (device is not None and tensor.device != device)
    ):
        raise ValueError(_format_message(operation, name, tensor, sizes, dtypes, device))


def _has_sizes(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a shape has these sizes, of which some may be ANY or AT_LEAST_ONE.

    A plain loop is fast, and this runs before every operation.
    """
    if len(shape) != len(sizes):
        return False
    for n, size in zip(shape, sizes, strict=True):  # noqa: SIM110
        if n != size and (size >= 0 or n < ANY - size):
            return False
    return True


def check_new_tokens(k: Tensor, v: Tensor, k_sizes: Sequence[int], v_sizes: Sequence[int]) -> None:
    """Raise ValueError unless k [n, *k_sizes] and v [n, *v_sizes] are the keys and values of the same tokens.

    `k_sizes` and `v_sizes` are (KV heads, head_dim) of keys and of values. torch would repeat those of one head, or of
    one token, without a word.
    """
    check_tensor("keys and values of new tokens", "k", k, (ANY, *k_sizes))
    check_tensor("keys and values of new tokens", "v", v, (len(k), *v_sizes), (k.dtype,), k.device)


def _format_message(
    operation: str,
    name: str,
    tensor: Tensor,
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> str:
    """Return an error message: what the tensor's sizes, dtype and device must be, and what they are."""
    wanted = ", ".join({ANY: "any", AT_LEAST_ONE: "at least 1"}.get(size, str(size)) for size in sizes)
    types = " or ".join(_format_dtype(dtype) for dtype in dict.fromkeys(dtypes))
    on_device = "" if device is None else f" on {device}"
    found = f"{_format_dtype(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
    return f"{operation}: {name} must be {types} [{wanted}]{on_device}, and is {found}"


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_blocks_apart(operation: str, blocks: Tensor, pages_per_block: int) -> None:
    """Raise ValueError if two different blocks have pages in common: the id of a block is its first page's number."""
    if pages_per_block > 1:
        gaps = blocks.unique().diff()
        check(bool((gaps >= pages_per_block).all()), "{}: blocks of {} pages overlap", operation, pages_per_block)


def check_slot_numbers(operation: str, src: Tensor, dst: Tensor, num_slots: int) -> None:
    """Raise ValueError if slots src or dst [N, 1 or H] are outside of a store, or a head's slot is written twice."""
    written = dst.T.contiguous().sort().values  # [1 or H, N]
    rules = {
        f"slots must be from 0 to {num_slots - 1}": [((x >= 0) & (x < num_slots)).all() for x in (src, dst)],
        "a slot is written twice": [(written.diff() != 0).all()],
    }
    held = torch.stack([torch.stack(each).all() for each in rules.values()]).tolist()
    for rule, holds in zip(rules, held, strict=True):
        check(holds, "{}: {}", operation, rule)


class SlotsChecker:
    """Checks the addresses of a step (`Slots`) only once, although the operations of every layer get them."""

    def __init__(self) -> None:
        self._checked: WeakKeyDictionary[Slots, tuple[KVStore, int]] = WeakKeyDictionary()

    def forget(self, at: Slots) -> None:
        """Check these addresses anew the next time, as their tensors may have been changed."""
        self._checked.pop(at, None)

    def check(self, operation: str, at: Slots, store: KVStore, tokens: int | None = None) -> int:
        """Return the tokens of the rows. Raises ValueError unless the addresses fit each other and lie in the store.

        If `tokens` is given, their rows must not have more tokens than that. On a GPU this waits for the GPU, once.
        """
        found = self._checked.get(at)
        if found is None or found[0] is not store:
            _check_sizes(operation, at, store)
            num_tokens = check_entries(operation, at, store.num_blocks) if at.num_tokens is None else at.num_tokens
            found = self._checked[at] = store, num_tokens
        check(
            tokens is None or found[1] <= tokens,
            "{}: the rows have {} tokens, but only {} are given",
            *(operation, found[1], tokens),
        )
        return found[1]


def _check_sizes(operation: str, at: Slots, store: KVStore) -> None:
    """Check the types and sizes of a step's addresses."""
    device, integers = store.device, (torch.int32,)
    heads = at.start.shape[1:] if store.split_heads else ()
    check(len(heads) == store.split_heads, "{}: a store of split heads needs a start for each head", operation)
    check_tensor(operation, "start", at.start, (ANY, *heads), integers, device)
    rows = at.num_rows
    check_tensor(operation, "table", at.table, (AT_LEAST_ONE, AT_LEAST_ONE), integers, device)
    check_tensor(operation, "table_row", at.table_row, (rows, *heads), integers, device)
    check_tensor(operation, "q_start", at.q_start, (rows + 1,), integers, device)
    if at.window_start is not None:
        check_tensor(operation, "window_start", at.window_start, (ANY, *heads), integers, device)
    for name in ("table_row", "q_start", "start", "window_start"):
        tensor = getattr(at, name)
        check(tensor is None or tensor.is_contiguous(), "{}: {} must be dense", operation, name)
    check(at.table.shape[1] == 1 or at.table.stride(1) == 1, "{}: the rows of table must be dense", operation)
    is_ring_valid = 0 <= at.sinks <= MAX_INDEX and 0 <= at.ring <= MAX_INDEX
    check(
        at.block_size == store.block_size and is_ring_valid and 0 <= at.num_decode <= rows,
        "{}: blocks of {} slots, {} sinks, a ring of {} and {} rows of one token do not fit a store of {} and {} rows",
        *(operation, at.block_size, at.sinks, at.ring, at.num_decode, store.block_size, rows),
    )
    most = MAX_INDEX if at.ring else at.table.shape[1] * at.block_size
    check(0 <= at.max_kv <= most, "{}: max_kv={} must be from 0 to {}", operation, at.max_kv, most)
    check(0 <= at.max_q <= MAX_INDEX, "{}: max_q={} must be from 0 to {}", operation, at.max_q, MAX_INDEX)


def check_entries(operation: str, at: Slots, num_blocks: int) -> int:
    """Check the numbers in a step's addresses, whose types and sizes are right; return the tokens of its rows.

    Raises ValueError if some are wrong, or outside of a store of `num_blocks` blocks.
    """
    R, M = at.table.shape
    start, table_row = by_head(at.start), by_head(at.table_row)  # [B, 1 or H]
    lengths = at.q_start.long().diff()[:, None]
    padding = start[:, :1] < 0  # [B, 1]
    end = start + lengths
    num_slots = torch.full_like(end, at.sinks + at.ring) if at.ring else end
    is_used = torch.arange(M, device=start.device) * at.block_size < num_slots[..., None]  # [B, 1 or H, M]
    blocks = at.table[table_row.clamp(0, R - 1)]
    size = at.sinks + at.ring if at.ring else M * at.block_size  # most tokens of a row
    rules = {
        "q_start must begin with 0 and ascend": ((lengths >= 0).all(), at.q_start[:1] == 0),
        f"table_row must be from 0 to {R - 1}": ((table_row >= 0) & (table_row < R) | padding,),
        f"the rows must fit the {size} slots of a row of the table": (
            (num_slots <= M * at.block_size) & (end - start.clamp_min(at.sinks) <= (at.ring or size)) | padding,
        ),
        "start must be negative for all heads of a row or for none": ((start < 0) == padding,),
        f"the table must have numbers of blocks from 0 to {num_blocks - 1}": (
            (blocks >= 0) & (blocks < num_blocks) | ~is_used | padding[..., None],
        ),
        f"the first num_decode={at.num_decode} rows must have one token, and no row more than max_q={at.max_q}": (
            lengths[: at.num_decode] == 1,
            lengths <= at.max_q,
            at.max_q <= at.q_start[-1:].clamp_min(1),
        ),
        f"indices of tokens must be below max_kv={at.max_kv}": ((end <= at.max_kv) | padding,),
    }
    if at.window_start is not None:
        rules["window_start must be from 0 to the index of each token"] = (_is_window_valid(at, start, lengths),)
    held = torch.stack([torch.stack([x.all() for x in each]).all() for each in rules.values()])
    *all_held, num_tokens = torch.cat((held, at.q_start[-1:])).tolist()  # waits for a GPU only once
    for rule, holds in zip(rules, all_held, strict=True):
        check(bool(holds), "{}: {}", operation, rule)
    return int(num_tokens)


def _is_window_valid(at: Slots, start: Tensor, lengths: Tensor) -> Tensor:
    """Return for each token of the rows whether its window begins at an index from 0 to its own; False: too few."""
    assert at.window_start is not None
    if bool((lengths < 0).any() | (lengths.sum() > len(at.window_start))):
        return start.new_zeros(1)  # before a tensor of a wrong length is made, which may exceed the memory
    row = torch.repeat_interleave(torch.arange(len(lengths), device=start.device), lengths[:, 0])
    index = compute_indices(start, lengths[:, 0], row)
    window_start = by_head(at.window_start)[: len(row)]
    return (window_start >= 0) & (window_start <= index) | (index < 0)


def by_head(x: Tensor) -> Tensor:
    """Return addresses [B] or [B, H] as int64 [B, 1] or [B, H]."""
    return (x if x.dim() == 2 else x[:, None]).long()


def compute_indices(start: Tensor, lengths: Tensor, row: Tensor) -> Tensor:
    """Return the index of each token of a step [N, 1 or H], from start [B, 1 or H], lengths [B] and its row [N]."""
    first = lengths.cumsum(0) - lengths  # [B] of each row among the tokens
    own = torch.arange(len(row), device=row.device) - first[row]
    return torch.where(start[row] < 0, start[row], start[row] + own[:, None])

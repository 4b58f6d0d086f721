"""The rows (`OpInfo`) of the operations' table for KV memory: writing, attention, copies, repeated heads, selection.

Their samples, with which the self-check calls them, are small, with odd widths, slices and lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.arguments import by_head
from kernels.kv_formats import UINT4, KVFormat, KVFormats
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.selfcheck.op_info import ATTENTION, EXACT, OpInfo, Samples, random_tensors
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots


def _draw_mean(heads: int, dim: int) -> Tensor:
    """Return a mean of keys [H, D]."""
    return 2 * torch.randn(heads, dim, generator=torch.Generator().manual_seed(0))


CASES = (
    (LayerSpec(2, 8, 16, 16, scale=0.25), Layout(300)),
    (LayerSpec(2, 14, 8, 24, scale=0.35), Layout(16, sinks=4, ring=61)),
    (LayerSpec(2, 2, 80, 80, scale=0.11, window=40, softcap=5.0, sink_logits=torch.tensor([0.0, 3.0])), Layout(16)),
    (LayerSpec(2, 6, 16, 16, scale=0.25, window=90), Layout(16, dropped=True, split_heads=True)),
)
INT8, INT4 = KVFormat(torch.int8), KVFormat(UINT4, rotated=True)
# Cases in quantized formats (of keys, of values); None: as computed. Vectors have one group, two, and a short last one.
QUANTIZED = (
    (*CASES[0], INT8, INT8),
    (CASES[2][0], Layout(16), INT4, INT4),
    (LayerSpec(2, 6, 64, 96, scale=0.125), Layout(16, sinks=4, ring=61), INT8, INT4),
    (LayerSpec(1, 2, 128, 64, scale=0.1), Layout(16, dropped=True, split_heads=True), INT4, None),
    (LayerSpec(2, 2, 96, 128, scale=0.1), Layout(300), None, KVFormat(UINT4)),
    (LayerSpec(2, 6, 80, 64, scale=0.1, k_mean=_draw_mean(2, 80)), Layout(16), INT4._replace(centered=True), INT4),
    (
        *(LayerSpec(2, 4, 32, 32, scale=0.2, k_mean=_draw_mean(2, 32)), Layout(16, dropped=True, split_heads=True)),
        *(INT8._replace(centered=True), INT8),
    ),
)
ROWS = (CaseRow(0, 1), CaseRow(200, 1), CaseRow(-1, 1), CaseRow(0, 9), CaseRow(187, 6), CaseRow(-1, 4))
# Rows of one token with so long a past that a backend may split their sequences.
LONG = (CaseRow(300, 1), CaseRow(-1, 1), CaseRow(256, 1), CaseRow(90, 1))


def _cases(writer: Ops, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, AttentionCase]]:
    for spec, layout in CASES:
        yield layout.kind, AttentionCase(writer, layout, _to_device(device, spec), ROWS, dtype, device)
    for spec, layout, k, v in QUANTIZED:
        formats = KVFormats(k or KVFormat(dtype), v or KVFormat(dtype))
        case = AttentionCase(writer, layout, _to_device(device, spec), ROWS, dtype, device, formats=formats)
        yield f"{layout.kind}, {formats}", case


def _to_device(device: torch.device, spec: LayerSpec) -> LayerSpec:
    logits, mean = (None if each is None else each.to(device) for each in (spec.sink_logits, spec.k_mean))
    return spec._replace(sink_logits=logits, k_mean=mean)


def _write_kv_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    for name, case in _cases(ops, dtype, device):
        ops.write_kv(case.store, case.layer, case.get_step_inputs(case.k), case.get_step_inputs(case.v), case.at)
        yield name, case.pages.memory.float()


def _write_kv_bytes(store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> int:
    return k.nbytes + v.nbytes + len(k) * _token_bytes(store, layer)


def _token_bytes(store: KVStore, layer: int, formats: KVFormats | None = None) -> int:
    """Return the bytes of one token's keys and values in one layer, in the store's formats or others."""
    heads, *dims = store.heads(layer)
    each = zip(formats or store.formats, dims, strict=True)
    return sum(heads * format.compute_vector_bytes(dim) for format, dim in each)


def _attend_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    for i, (name, case) in enumerate(_cases(ReferenceOps(), dtype, device)):
        case.write()
        yield from _attend(name, case, ops, with_lse=i % 2 == 0)
    spec = CASES[0][0]._replace(sink_logits=random_tensors(device)(CASES[0][0].num_q_heads))
    case = AttentionCase(ReferenceOps(), Layout(16), spec, LONG, dtype, device)
    case.write()
    yield from _attend("long texts", case, ops, with_lse=True)


def _attend(name: str, case: AttentionCase, ops: Ops, *, with_lse: bool) -> Samples:
    """Yield the outputs of each row, the logarithms of its sums among them only if `with_lse`."""
    window = 45 if case.layout.ring else None
    results = case.attend_with_lse(ops, window=window) if with_lse else zip(case.attend(ops, window=window))
    for row, tensors in zip(case.rows, results, strict=True):
        for what, tensor in zip(("", ": lse"), tensors, strict=False):
            yield f"{name}, {row.tokens} after {row.past}{what}", tensor


def chained_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    """Yield the outputs of a chain of launches, each of which reads what the one before it has written.

    Nothing waits between them, so they are wrong if the device does not run launches in order.
    """
    case = AttentionCase(ops, Layout(16), CASES[0][0], ROWS, dtype, device)
    first, second = case.table[1].tolist()[:2]  # the first blocks of a row with a past; block 0 is unused
    case.write()
    outs = [case.attend()]
    ops.copy_blocks(case.store, [second], [0])
    ops.copy_blocks(case.store, [first], [second])
    outs.append(case.attend())
    ops.copy_blocks(case.store, [0], [second])
    outs.append(case.attend())
    for what, out in zip(("written", "a block overwritten", "restored"), outs, strict=True):
        yield what, torch.cat(out)


def _attend_bytes(
    out: Tensor,
    q: Tensor,
    store: KVStore,
    layer: int,
    at: Slots,
    spec: LayerSpec,
    *,
    window: int | None = None,
    lse: Tensor | None = None,
) -> int:
    """Return the bytes of the keys that each row sees: those within both windows, and the sinks within the model's."""
    starts, lengths = by_head(at.start), at.q_start.diff()[:, None]
    model_oldest = (starts + 1 - (at.max_kv if spec.window is None else spec.window)).clamp_min(0)
    if at.window_start is not None and spec.window is not None:
        model_oldest = by_head(at.window_start)[at.q_start[:-1].clamp_max(len(q) - 1)]
    oldest = model_oldest if window is None else model_oldest.maximum(starts + 1 - window)
    keys = starts + lengths - oldest + (oldest.clamp_max(at.sinks) - model_oldest).clamp_min(0)
    seen = keys.where(starts >= 0, 0).float().mean(1).sum()  # heads may keep different numbers
    return int(seen * _token_bytes(store, layer))


def _gather_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    for name, case in _cases(ReferenceOps(), dtype, device):
        case.write()
        indices = by_head(case.at.start)[4] + torch.arange(6, device=device)[:, None]
        for plane in ops.gather(
            case.store, case.layer, case.at, 4, indices if case.layout.split_heads else indices[:, 0]
        ):
            yield name, plane


def _gather_bytes(store: KVStore, layer: int, at: Slots, row: int, indices: Tensor) -> int:
    read = KVFormats(*(KVFormat(torch.float32) if each.is_quantized else each for each in store.formats))
    return len(indices) * (_token_bytes(store, layer) + _token_bytes(store, layer, read))


def _copy_blocks_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    for name, case in _cases(ReferenceOps(), dtype, device):
        ops.copy_blocks(case.store, [3, 4], [0, 1])
        yield name, case.pages.memory.float()


def _copy_blocks_bytes(store: KVStore, src: list[int], dst: list[int]) -> int:
    return 2 * len(src) * store.block_bytes


def _copy_tokens_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    for name, case in _cases(ReferenceOps(), dtype, device):
        size, heads = case.store.block_size, case.store.k(case.layer).shape[1]
        full = case.table[[1 * case.heads, 4 * case.heads], 0].long()  # the first blocks of the rows with a past
        blocks = torch.stack((full, torch.tensor([0, 1], device=device)))
        src, dst = (blocks[..., None] * size + torch.arange(size, device=device)).flatten(1)
        count = 2 * size // 3 - 1
        kept = torch.stack([src[head::3][:count] for head in range(heads)], 1)  # in each head other tokens
        if heads == 1:
            kept = kept[:, 0].contiguous()
        ops.copy_tokens(case.store, case.layer, kept, dst[:count])
        yield name, case.pages.memory.float()


def _copy_tokens_bytes(store: KVStore, layer: int, src: Tensor, dst: Tensor) -> int:
    heads = store.k(layer).shape[1]  # of a block
    return 2 * len(src) * _token_bytes(store, layer) * heads // store.heads(layer)[0]


def _repeat_kv_heads_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    for groups in (1, 7):
        yield f"groups of {groups}", ops.repeat_kv_heads(draw(9, 2, 24).to(dtype), groups)
    yield "of a slice", ops.repeat_kv_heads(draw(9, 6, 24).to(dtype)[2:, 1:4], 4)


def _repeat_kv_heads_bytes(x: Tensor, groups: int) -> int:
    return (1 + groups) * x.nbytes


def _repeat_kv_heads_step_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    draw = random_tensors(device)
    for start, n in ((0, 1), (4, 5)):
        whole = draw(14, 11, 30).to(dtype)
        ops.repeat_kv_heads_step(whole[1:13, :9, 3:27], draw(n, 6, 24).to(dtype)[:, 1:4], start)
        yield f"{n} columns of a slice", whole


def _repeat_kv_heads_step_bytes(mirror: Tensor, x: Tensor, start: int) -> int:
    return (1 + len(mirror) // x.shape[1]) * x.nbytes


def _select_blocks_samples(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    """Yield selections by bounds of small whole numbers: all are exact, and many are equal."""
    draw = random_tensors(device)
    for dim, group, num_candidates in ((16, 7, 40), (12, 1, 70), (64, 4, 32)):
        q, summaries = draw(3, 2 * group, dim + 5).round().to(dtype), draw(90, 2 * dim + 5).round().to(dtype)
        order = torch.randperm(90, generator=torch.Generator().manual_seed(dim)).int().to(device)
        candidates = torch.stack([order.roll(9 * i)[:num_candidates] for i in range(6)]).view(3, 2, -1)
        counts = torch.tensor([[num_candidates, 9], [17, 16], [5, 5]], dtype=torch.int32, device=device)
        out = torch.full((3, 2, 20), -1, dtype=torch.int32, device=device)
        ops.select_blocks(out[..., 2:], q[..., 2:-3], summaries[:, 3:-2], candidates, counts)
        yield f"{group} query heads of {dim}", out.to(torch.float32)


def _select_blocks_bytes(out: Tensor, q: Tensor, summaries: Tensor, candidates: Tensor, counts: Tensor) -> int:
    num_read = candidates.shape[1] * int(counts[:, 0].sum())
    return q.nbytes + num_read * (summaries[:1].nbytes + candidates.itemsize) + out.nbytes


WHOLE_TEXT = "the whole text, read once and written `groups` times"
NEW_COLUMNS = "the new columns alone, read once and written `groups` times"

CACHE_OPS = (
    OpInfo("write_kv", EXACT, _write_kv_samples, "the new keys and values, in and out", _write_kv_bytes, ("k", "v")),
    OpInfo("attend", ATTENTION, _attend_samples, "all keys and values that a row sees, once", _attend_bytes, ("q",)),
    OpInfo("gather", EXACT, _gather_samples, "the keys and values read, in and out", _gather_bytes, ()),
    OpInfo("copy_blocks", EXACT, _copy_blocks_samples, "the blocks, in and out", _copy_blocks_bytes, ()),
    OpInfo(
        "copy_tokens",
        EXACT,
        _copy_tokens_samples,
        "the keys and values copied, in and out",
        _copy_tokens_bytes,
        (),
    ),
    OpInfo(
        "repeat_kv_heads",
        EXACT,
        _repeat_kv_heads_samples,
        WHOLE_TEXT,
        _repeat_kv_heads_bytes,
        ("x",),
    ),
    OpInfo(
        "repeat_kv_heads_step",
        EXACT,
        _repeat_kv_heads_step_samples,
        NEW_COLUMNS,
        _repeat_kv_heads_step_bytes,
        ("x",),
    ),
    OpInfo(
        "select_blocks",
        EXACT,
        _select_blocks_samples,
        "the queries; the candidates and their summaries; out",
        _select_blocks_bytes,
        ("q",),
    ),
)

"""All layers in one call give the bits of their single operations, for any step and any weights."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kernels.composite import CompositeOps
from kernels.kv_formats import INT4, INT8, KVFormats
from kernels.ops import (
    DTYPES,
    AttentionSlice,
    AttentionWeights,
    DecoderLayer,
    DecoderLayers,
    GatedMLP,
    KVLocation,
    Ops,
    QueryTap,
    Weight,
)
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout, Step
from kernels.types import LayerSpec
from kernels.weights.block_formats import FORMATS
from kernels.weights.stored import ConcatenatedWeight
from tests.kernels.backend_matrix import BACKENDS, NAMES
from tests.kernels.block_weights import draw_weight
from tests.kernels.quantized_weights import quantize_as_mlx

WIDTH, DIM, HEADS, KV_HEADS = 96, 32, 6, 2
SPECS = [
    LayerSpec(KV_HEADS, HEADS, DIM, DIM, scale=0.2, k_mean=torch.randn(KV_HEADS, DIM)),
    LayerSpec(KV_HEADS, HEADS, DIM, DIM, scale=0.1, window=7, softcap=20.0, sink_logits=torch.randn(HEADS)),
]
ROWS = (CaseRow(0, 60),) * 4
LAYOUTS = (Layout(16), Layout(4, sinks=2, ring=50))
STEPS: dict[str, Sequence[tuple[int, int, int]]] = {  # after 40 tokens of each
    "one token": [(0, 40, 1)],
    "a few, and one of nobody": [(2, 40, 1), (0, -1, 1), (3, 40, 1)],
    "chunks": [(1, 40, 1), (0, 40, 17), (3, 40, 20)],
}


Bits = int | Literal["blocks"] | None  # of numbers; each projection in a block format of its own; None: floats


def weight(dtype: torch.dtype, *shape: int, bits: Bits = None, parts: Sequence[int] = ()) -> Weight:
    """Return a weight; `parts` are the outputs of the projections of which it consists."""
    if bits == "blocks":
        rng = random.Random(int(torch.randint(1 << 31, ())))
        names = [format for format in FORMATS.values() if format.columns == 32]
        drawn = [
            draw_weight(rng, rng.choice(names), rows, shape[1] // 32, spread=shape[1] ** -0.5)
            for rows in parts or shape[:1]
        ]
        return ConcatenatedWeight(drawn)
    values = (torch.randn(*shape) / shape[1] ** 0.5).to(dtype)
    return values if bits is None else quantize_as_mlx(values, bits, 32)


def layer(dtype: torch.dtype, i: int, bits: Bits) -> DecoderLayer:
    """Return a layer: the first as simple as possible, the second with everything that a layer may have."""
    angle, heads, inner = torch.rand(64, DIM // 2) * 6, HEADS + 2 * KV_HEADS, (128, 160)[i]
    norm, next_norm, post = torch.rand(3, WIDTH).to(dtype).unbind()
    around = AttentionWeights(
        norm=norm,
        qkv=weight(dtype, heads * DIM, WIDTH, bits=bits, parts=(HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)),
        qkv_bias=None,
        qk_norm=None,
        tables=(angle.cos(), angle.sin()),
        q_heads=HEADS,
        kv_heads=KV_HEADS,
        o=weight(dtype, WIDTH, HEADS * DIM, bits=bits),
        o_bias=None,
        post_norm=None,
        next_norm=next_norm,
        eps=1e-6,
    )
    up = weight(dtype, 2 * inner, WIDTH, bits=bits, parts=(inner, inner))
    down = weight(dtype, WIDTH, inner, bits=bits)
    fed = GatedMLP(up, None, down, None, ("silu", "gelu_tanh")[i])
    if i == 0:
        return DecoderLayer(SPECS[0], around, fed, None)
    biases, q_norm, k_norm = torch.randn(2 * inner).to(dtype), *torch.rand(2, DIM).to(dtype).unbind()
    around = replace(around, qkv_bias=biases[: heads * DIM], qk_norm=(q_norm, k_norm), post_norm=post, o_bias=post)
    fed = replace(fed, gate_up_bias=biases, down_bias=biases[:WIDTH])
    return DecoderLayer(SPECS[1], replace(around, norm=norm.float(), tables=None), fed, post)


def stack_of(ops: Ops, dtype: torch.dtype, bits: Bits) -> DecoderLayers:
    torch.manual_seed(0)
    return ops.pack_layers([layer(dtype, i, bits).pack(ops) for i in range(len(SPECS))], dtype)


def after(
    ops: Ops, stack: DecoderLayers, dtype: torch.dtype, formats: KVFormats | None, step: str, *, apart: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of a step, without padding, and the KV memory."""
    torch.manual_seed(1)
    scenes = [AttentionCase(ops, each, SPECS[1], ROWS, dtype, before=SPECS[:1], formats=formats) for each in LAYOUTS]
    x = torch.empty(0)
    for rows in ([(row, 0, 40) for row in range(len(ROWS))], STEPS[step]):
        n = sum(tokens for _, _, tokens in rows)
        windows = [45 if case.layout.ring else None for case in scenes]
        stored = [
            (slice(i * n, i * n + n), KVLocation(case.store, case.make_slots(rows), window))
            for i, (case, window) in enumerate(zip(scenes, windows, strict=True))
        ]
        x, attention = torch.randn(len(scenes) * n, WIDTH).to(dtype), Step(ops, SPECS, stored)
        x = CompositeOps.forward_layers(ops, stack, x, attention) if apart else ops.forward_layers(stack, x, attention)
    idle = [i for i, (_, start, _) in enumerate(rows) if start < 0]
    return x[[i for i in range(len(x)) if i % n not in idle]], [case.pages.memory for case in scenes]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("bits", [None, 8, 4, "blocks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_single_operations(backend: str, dtype: torch.dtype, bits: Bits, step: str) -> None:
    ops = BACKENDS[backend]()
    stack = stack_of(ops, dtype, bits)
    format = {8: INT8, 4: INT4}[bits] if isinstance(bits, int) else None
    formats = None if format is None else KVFormats(format._replace(centered=True), format)
    (ours, our_memory), (theirs, their_memory) = (
        after(ops, stack, dtype, formats, step, apart=apart) for apart in (False, True)
    )
    assert not ours.isnan().any()
    assert torch.equal(ours, theirs)
    assert all(map(torch.equal, our_memory, their_memory))


class HookedStep(Step):
    """A step in which some slices compute some layers themselves, as the kernels would, and copy some queries."""

    def __init__(
        self,
        ops: Ops,
        stored: Sequence[tuple[slice, KVLocation]],
        hooks: Sequence[tuple[int, int]],
        taps: Mapping[int, Tensor],
    ) -> None:
        """`hooks` are pairs (slice, layer); `taps` has by slice which of its tokens' queries are copied."""
        super().__init__(ops, SPECS, stored)
        self.called: list[tuple[int, int]] = []
        self.copies = {
            i: [torch.full((len(tokens), HEADS, DIM), torch.nan, dtype=stored[0][1].store.k(0).dtype) for _ in SPECS]
            for i, tokens in taps.items()
        }
        whole = self.slices
        self.slices = [
            AttentionSlice(
                each.tokens,
                [None if (i, layer) in hooks else where for layer, where in enumerate(each.kv_locations)],
                QueryTap(taps[i], self.copies[i]) if i in taps else None,
                partial(self._run_hook, ops, i, whole[i].kv_locations),
            )
            for i, each in enumerate(whole)
        ]

    def _run_hook(
        self, ops: Ops, i: int, stored: Sequence[KVLocation], layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        self.called.append((i, layer))
        store, at, window = stored[layer]
        out.fill_(torch.nan)
        ops.write_kv(store, layer, k, v, at)
        ops.attend(out, q, store, layer, at, SPECS[layer], window=window)


@pytest.mark.parametrize(
    "hooks", [[(0, 0)], [(1, 1)], [(0, 0), (1, 1)], [(0, 0), (0, 1)], [(0, 1), (1, 1), (1, 0)], []]
)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpu")])
def test_a_slice_that_computes_its_own_attention_changes_no_bits(
    backend: str, dtype: torch.dtype, step: str, hooks: list[tuple[int, int]]
) -> None:
    ops = BACKENDS[backend]()
    stack, rows = stack_of(ops, dtype, None), STEPS[step]
    n, windows = sum(tokens for _, _, tokens in rows), (None, 45)
    x = torch.randn(len(LAYOUTS) * n, WIDTH).to(dtype)
    found, memories, copies = [], [], []
    for hooked in (False, True):
        cases = [AttentionCase(ops, each, SPECS[1], ROWS, dtype, before=SPECS[:1]) for each in LAYOUTS]
        for case in cases:
            case.pages.memory.zero_()  # the past of all layers
        stored = [
            (slice(i * n, i * n + n), KVLocation(case.store, case.make_slots(rows), window))
            for i, (case, window) in enumerate(zip(cases, windows, strict=True))
        ]
        taps = {1: torch.arange(0, n, 2)}
        attention = HookedStep(ops, stored, hooks if hooked else [], taps)
        found.append(ops.forward_layers(stack, x, attention))
        assert attention.called == (sorted(hooks, key=lambda hook: (hook[1], hook[0])) if hooked else [])
        memories.append([case.pages.memory for case in cases])
        copies.append(attention.copies[1])
    idle = [i for i, (_, start, _) in enumerate(rows) if start < 0]
    real = [i for i in range(len(x)) if i % n not in idle]
    assert torch.equal(found[0][real], found[1][real])
    assert all(map(torch.equal, *memories))
    assert all(map(torch.equal, *copies))
    assert all(copy.isfinite().all() for copy in copies[0])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpu")])
def test_queries_are_copied_as_attention_gets_them(backend: str) -> None:
    ops, dtype = BACKENDS[backend](), torch.float32
    stack, rows = stack_of(ops, dtype, None), STEPS["chunks"]
    n = sum(tokens for _, _, tokens in rows)
    case = AttentionCase(ops, LAYOUTS[0], SPECS[1], ROWS, dtype, before=SPECS[:1])
    case.pages.memory.zero_()
    seen: list[Tensor] = []

    class Recording(HookedStep):
        def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append(q.clone())
            return super().attend(layer_idx, q, k, v)

    tokens = torch.tensor([0, 3, n - 1])
    stored = [(slice(0, n), KVLocation(case.store, case.make_slots(rows), None))]
    step, x = Recording(ops, stored, [], {0: tokens}), torch.randn(n, WIDTH)
    ops.forward_layers(stack, x, step)
    CompositeOps.forward_layers(ops, stack, x, step)
    assert len(seen) == len(SPECS)
    assert all(torch.equal(q[tokens], copy) for q, copy in zip(seen, step.copies[0], strict=True))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpu")])
def test_a_hook_that_raises_ends_the_step_and_the_next_one_is_right(backend: str) -> None:
    ops, dtype = BACKENDS[backend](), torch.float32
    stack, rows = stack_of(ops, dtype, None), STEPS["one token"]
    case = AttentionCase(ops, LAYOUTS[0], SPECS[1], ROWS, dtype, before=SPECS[:1])
    case.pages.memory.zero_()
    stored = [(slice(0, 1), KVLocation(case.store, case.make_slots(rows), None))]
    x = torch.randn(1, WIDTH)
    right = ops.forward_layers(stack, x, Step(ops, SPECS, stored))

    def fail(*args: object) -> None:
        raise RuntimeError("by a hook")

    broken = HookedStep(ops, stored, [(0, 1)], {})
    broken.slices = [each._replace(hook=fail) for each in broken.slices]
    with pytest.raises(RuntimeError, match="by a hook"):
        ops.forward_layers(stack, x, broken)
    assert torch.equal(ops.forward_layers(stack, x, Step(ops, SPECS, stored)), right)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpu")])
def test_a_hook_may_give_torch_more_threads(backend: str) -> None:
    class Waking(HookedStep):
        def _run_hook(self, *args: Any) -> None:
            torch.set_num_threads(5)
            super()._run_hook(*args)

    ops, dtype, threads = BACKENDS[backend](), torch.float32, torch.get_num_threads()
    stack, rows = stack_of(ops, dtype, None), STEPS["chunks"]
    n = sum(tokens for _, _, tokens in rows)
    case = AttentionCase(ops, LAYOUTS[0], SPECS[1], ROWS, dtype, before=SPECS[:1])
    case.pages.memory.zero_()
    stored, x = [(slice(0, n), KVLocation(case.store, case.make_slots(rows), None))], torch.randn(n, WIDTH)
    try:
        torch.set_num_threads(1)
        right = ops.forward_layers(stack, x, Step(ops, SPECS, stored))
        assert torch.equal(ops.forward_layers(stack, x, Waking(ops, stored, [(0, 0)], {})), right)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", NAMES)
def test_threads_do_not_change_it(backend: str) -> None:
    ops = BACKENDS[backend]()
    stack, threads = stack_of(ops, torch.bfloat16, None), torch.get_num_threads()
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        try:
            found.append(after(ops, stack, torch.bfloat16, None, "chunks", apart=False)[0])
        finally:
            torch.set_num_threads(threads)
    if backend.startswith("cpu"):
        assert all(torch.equal(found[0], each) for each in found[1:])
    else:  # torch's own products, whose sums may be ordered by the number of threads
        assert all((found[0] - each).norm() <= 0.01 * found[0].norm() for each in found[1:])

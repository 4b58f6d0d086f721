"""Properties of the C++ kernels beyond the table: bits that depend on positions alone, heads of any width, products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from config.settings import StrategySettings
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import random_text
from tests.contract import harness
from tests.contract.harness import World
from tests.kernels.backend_matrix import BACKENDS, TOLERANCE
from tests.kernels.quantized_weights import quantize_as_mlx
from tests.kernels.test_attention import expected

CPU = [name for name in BACKENDS if name.startswith("cpu-")]
LAYERS = (LayerSpec(2, 14, 16, 16, scale=0.25), LayerSpec(1, 2, 24, 8, scale=0.2, window=1500, softcap=5.0))
LENGTH = 2100  # three splits
DTYPES = (torch.float32, torch.bfloat16)  # AMX has a kernel of its own for bfloat16
TEXTS = {dtype: [random_text(seed, LENGTH, LAYERS, dtype) for seed in (1, 2)] for dtype in DTYPES}
STRATEGIES = {
    "contiguous": StrategySettings(kind="contiguous"),
    "blocks_of_7": StrategySettings(kind="paged", block_size=7),
    "ring": StrategySettings(kind="sliding_window", window=2200, sinks=3),
}


@pytest.fixture(scope="module", params=CPU)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "make_ops", BACKENDS[request.param])
        yield request.param


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="module")
def want(backend: str, dtype: torch.dtype) -> list[Tensor]:
    return read("contiguous", [1500, 600], dtype)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read(name: str, chunks: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Return the output of attention for the last 60 tokens of a sequence, in each layer, beside another sequence."""
    world = World(STRATEGIES, layers=LAYERS, dtype=dtype, max_seats=2, max_seq_len=2200, max_num_batched_tokens=4400)
    reading, other = (world.open(name, text) for text in TEXTS[dtype])
    outs: list[list[Tensor]] = []
    for i, chunk in enumerate(chunks):
        rows = [(reading, chunk)] if i % 2 else [(other, 1), (reading, chunk)]
        outs.append(step(rows).outs[-1])
    assert not reading.left
    return [torch.cat(layer)[-60:] for layer in zip(*outs, strict=True)]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("chunks", [[LENGTH], [700] * 3, [2040, *[1] * 60], [1000, 1030, 7, 3, 60]], ids=str)
def test_bits_depend_neither_on_chunks_nor_on_neighbours_nor_on_where_keys_lie(
    want: list[Tensor], chunks: list[int], name: str, dtype: torch.dtype
) -> None:
    for got, layer in zip(read(name, chunks, dtype), want, strict=True):
        assert torch.equal(got, layer)


def test_bits_do_not_depend_on_threads(backend: str, one_thread: None, dtype: torch.dtype) -> None:
    alone = read("blocks_of_7", [2040, *[1] * 60], dtype)
    torch.set_num_threads(3)
    for got, want in zip(read("blocks_of_7", [2040, *[1] * 60], dtype), alone, strict=True):
        assert torch.equal(got, want)


def test_bfloat16_is_as_near_to_the_definition_as_torch_is(backend: str) -> None:
    spec, row = LayerSpec(2, 14, 64, 64, scale=1 / 8), CaseRow(700, 5)
    case = AttentionCase(BACKENDS[backend](), Layout(32), spec, [row], torch.bfloat16)
    case.write()
    want = expected(case, 0, None)
    q, k, v = (part[0].transpose(0, 1)[None] for part in (case.q, case.k, case.v))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
    torchs = dense[0].transpose(0, 1)[row.past :]
    assert (case.attend()[0].double() - want).norm() < 1.1 * (torchs.double() - want).norm()


def test_in_bfloat16_scores_of_any_size_overflow_nothing(backend: str) -> None:
    spec = LayerSpec(2, 8, 16, 16, scale=1e4)
    case = AttentionCase(BACKENDS[backend](), Layout(16), spec, [CaseRow(1100, 1), CaseRow(130, 8)], torch.bfloat16)
    case.write()
    for i, out in enumerate(case.attend()):
        assert out.isfinite().all()
        assert (out.double() - expected(case, i, None)).abs().max() < 2e-2


@pytest.mark.parametrize("scale", [0.25, 1e4], ids=["many weights", "one weight"])
@pytest.mark.parametrize("index", [0, 1395, 1500], ids=["a sink", "at the window's edge", "in the window"])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize(
    ("kept", "wrong"), [(None, torch.nan), (None, torch.inf), (torch.int8, torch.nan)], ids=["nan", "inf", "int8"]
)
def test_a_number_that_is_not_finite_comes_through_where_it_is_seen(
    backend: str, dtype: torch.dtype, kept: torch.dtype | None, wrong: float, part: int, index: int, scale: float
) -> None:
    spec, rows, window = LayerSpec(1, 3, 16, 16, scale=scale), [CaseRow(2100, 1), CaseRow(2090, 11)], 700
    case = AttentionCase(BACKENDS[backend](), Layout(16, sinks=1, ring=2200), spec, rows, dtype, formats=kept)
    case.q = [q.abs() for q in case.q]  # so that a score of an infinite key is infinite, and not minus infinity
    case.write()
    before = case.attend(window=window)
    plane = case.store.planes(0)[part]
    for row in range(len(rows)):
        block, slot = case.at.locate(case.at.table_row[row], torch.tensor(index))
        (plane.numbers if plane.scale is None else plane.scale)[block, 0, slot] = wrong
    for row, clean, out in zip(rows, before, case.attend(window=window), strict=True):
        query = torch.arange(row.past, row.past + row.tokens)
        sees = (query - index < window) | (index < case.layout.sinks)
        assert not out[sees].isfinite().any()
        assert torch.equal(out[~sees], clean[~sees])


def test_memory_for_a_query_does_not_grow_with_its_position_if_it_sees_sinks_and_a_window(
    backend: str, dtype: torch.dtype
) -> None:
    ops, spec, sinks, ring = BACKENDS[backend](), LayerSpec(2, 4, 16, 16, scale=0.25), 4, 1024
    page = compute_block_bytes([spec], sinks + ring, dtype)
    store = KVStore(Pages(1, page), [spec], sinks + ring, dtype)
    for plane in (store.k(0), store.v(0)):
        plane.copy_(torch.randn(plane.shape))
    q, outs, sizes = torch.randn(1, 4, 16).to(dtype), [], []
    for start in (5000, 5000 + 2000 * 1024):  # each key has the same place in its tile
        numbers = [[0], [0, 1], [start]]
        table_row, q_start, starts = (torch.tensor(x, dtype=torch.int32) for x in numbers)
        at = Slots(table_row.view(1, 1), sinks + ring, table_row, q_start, starts, 1, 1, start + 1, sinks, ring)
        outs.append(torch.full((1, 4, 16), torch.nan, dtype=dtype))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            ops.attend(outs[-1], q, store, 0, at, spec, window=700)
        sizes.append(sum(max(0, event.self_cpu_memory_usage) for event in found.key_averages()))  # allocated bytes
    assert torch.equal(*outs)
    assert sizes[0] == sizes[1] > 0


def test_heads_wider_than_the_kernels_are_left_to_plain_torch(backend: str) -> None:
    spec = LayerSpec(1, 2, 320, 16, scale=0.05)
    case = AttentionCase(BACKENDS[backend](), Layout(16), spec, [CaseRow(40, 1), CaseRow(20, 5)], torch.float32)
    case.write()
    for i, out in enumerate(case.attend()):
        assert (out.double() - expected(case, i, None)).abs().max() < 3e-6


def test_queries_that_share_one_kv_head_may_be_more_than_go_together(backend: str, dtype: torch.dtype) -> None:
    spec = LayerSpec(1, 71, 16, 16, scale=0.25)  # Falcon 7B's
    case = AttentionCase(BACKENDS[backend](), Layout(16), spec, [CaseRow(40, 1), CaseRow(20, 5)], dtype)
    case.write()
    for i, out in enumerate(case.attend()):
        assert (out.double() - expected(case, i, None)).abs().max() < TOLERANCE[dtype]


def test_the_widest_heads_with_as_many_rows_as_go_together(backend: str, dtype: torch.dtype) -> None:
    spec = LayerSpec(1, 1, 256, 256, scale=1 / 16)
    rows = [CaseRow(0, 48), CaseRow(70, 48), CaseRow(30, 128)]
    case = AttentionCase(BACKENDS[backend](), Layout(16), spec, rows, dtype)
    case.write()
    for i, out in enumerate(case.attend()):
        assert (out.double() - expected(case, i, None)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(backend: str, dtype: torch.dtype) -> None:
    linear = BACKENDS[backend]().linear
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((70, 83), (37, 83), (37,)))
    alone = torch.cat([linear(row[None], weight, bias) for row in x])
    for rows in (2, 3, 5, 8, 17, 33, 70):
        assert torch.equal(linear(x[:rows], weight, bias), alone[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_a_quantized_product_does_not_depend_on_the_others(
    backend: str, bits: int, dtype: torch.dtype
) -> None:
    ops = BACKENDS[backend]()
    linear = ops.linear
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((40, 96), (37, 96), (37,)))
    for group in (32, 48):  # the kernel's, and one that is the reference's
        quantized = quantize_as_mlx(weight, bits, group)
        alone = torch.cat([linear(row[None], quantized, bias) for row in x])
        for rows in (2, 3, 5, 8, 40):
            assert torch.equal(linear(x[:rows], quantized, bias), alone[:rows])


def test_a_quantized_product_that_cannot_be_is_refused(backend: str) -> None:
    weight = quantize_as_mlx(torch.randn(5, 64), 4, 32)
    with pytest.raises(ValueError, match="linear: x must be"):
        BACKENDS[backend]().linear(torch.ones(2, 32), weight)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(2, 4), torch.ones(4, 8), None),
        (torch.ones(8), torch.ones(4, 8), None),
        (torch.ones(2, 8), torch.ones(8, 4).T, None),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(2)),
    ],
    ids=("widths", "dimensions", "not dense", "bias"),
)
def test_a_product_that_cannot_be_is_refused(backend: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(ValueError, match="linear: "):
        BACKENDS[backend]().linear(x, weight, bias)

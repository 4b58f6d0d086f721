"""Keys and values in few bits, on every instruction set: the bits that are written, and attention over them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.kv_formats import UINT4, KVFormat, KVFormats
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.types import LayerSpec
from tests.kernels.backend_matrix import BACKENDS, TOLERANCE
from tests.kernels.test_attention import assert_close, expected, expected_lse

CPUS = [name for name in BACKENDS if name.startswith("cpu-")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = (8, 16, 24, 64, 80, 96, 128, 256)
GROUP = 64
FORMATS = {
    "model": None,
    "int8": KVFormat(torch.int8),
    "int8 rotated": KVFormat(torch.int8, rotated=True),
    "int4": KVFormat(UINT4),
    "int4 rotated": KVFormat(UINT4, rotated=True),
}
PAIRS = [
    *product(("model", "int8", "int4 rotated"), repeat=2),
    ("int4", "int4"),
    ("int8 rotated", "int8 rotated"),
    ("model", "int8 rotated"),
    ("int8 rotated", "int4"),
]

Floats = NDArray[np.float32]

pytestmark = [
    pytest.mark.parametrize("backend", CPUS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


# -------------------------------------------------------------------- the format, by numpy
def to_bfloat16(x: Floats) -> Floats:
    """Return x rounded to bfloat16: halves to even."""
    bits = np.atleast_1d(x).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def rotate(x: Floats) -> Floats:
    """Return a vector times a Hadamard matrix, by additions in the order that the format fixes."""
    size, y, half = len(x) & -len(x), x.copy(), 1
    while half < size:
        for i in range(len(x)):
            if not i & half:
                y[i], y[i + half] = y[i] + y[i + half], y[i] - y[i + half]
        half *= 2
    return y * np.float32(size**-0.5)


def quantize(x: Floats, rotated: bool) -> tuple[list[int], list[list[float]]]:
    """Return (bytes, scales [groups, 2]) of a vector."""
    x = rotate(x) if rotated else x
    numbers, scales = [], []
    for group in np.split(x, range(GROUP, len(x), GROUP)):
        (low, first), (high, second) = map(quantize_half, np.split(group, 2))
        numbers += (low | high << 4).tolist()
        scales.append([first, second])
    return numbers, scales


def quantize_half(x: Floats) -> tuple[NDArray[np.uint8], float]:
    """Return (integers, scale) of half a group."""
    extreme = x.max() if x.max() > -x.min() else x.min()
    [scale] = to_bfloat16(extreme / np.float32(-8))
    if not np.isfinite([*x, scale]).all():
        return np.full(len(x), 8, np.uint8), np.nan
    exact = x / (scale if abs(scale) > 1e-30 else np.float32(1e-30))
    return np.clip(np.rint(exact) + 8, 0, 15).astype(np.uint8), float(scale)


def hadamard(dim: int) -> Tensor:
    """Return the matrix of the rotation, from its definition."""
    matrix, two = np.ones((1, 1)), np.array([[1, 1], [1, -1]])
    size = dim & -dim
    while len(matrix) < size:
        matrix = np.kron(two, matrix)
    return torch.from_numpy(np.kron(np.eye(dim // size), matrix / size**0.5))


# -------------------------------------------------------------------- writing
def draw_vectors(dim: int, dtype: torch.dtype) -> Tensor:
    """Return vectors [n, 2, dim]: random ones, and those at the limits of the format."""
    x = torch.randn(16, 2, dim)
    x[1] = 0
    x[2] = 3.14
    x[3, 0, dim - 1] = torch.nan
    x[4, 1, 0] = -torch.inf
    x[5] *= 1e-30
    x[6, :, dim // 2] = 1000
    x[7] = torch.randint(16, (2, dim)) / 4.0 - 1  # many halves between two integers
    x[8] *= 1e30 if dtype is not torch.float16 else 1e4
    return x.to(dtype)


@pytest.mark.parametrize("rotated", [False, True], ids=["as it is", "rotated"])
@pytest.mark.parametrize("dim", DIMS)
def test_int4_has_the_bits_that_the_format_says(backend: str, dtype: torch.dtype, dim: int, rotated: bool) -> None:
    spec, format = LayerSpec(2, 2, dim, dim), KVFormat(UINT4, rotated)
    formats, vectors = KVFormats(format, format), draw_vectors(dim, dtype)
    case = AttentionCase(BACKENDS[backend](), Layout(16), spec, [CaseRow(0, len(vectors))], dtype, formats=formats)
    case.k, case.v = [vectors], [vectors.flip(0)]
    case.write()
    block = int(case.at.table[case.at.table_row[0], 0])
    for given, plane in zip((case.k, case.v), case.store.planes(0), strict=True):
        assert plane.scale is not None
        for token, head in product(range(len(vectors)), range(2)):
            numbers, scales = quantize(given[0][token, head].float().numpy(), rotated)
            assert plane.numbers[block, head, token].tolist() == numbers
            found = plane.scale[block, head, token].double()
            torch.testing.assert_close(found, torch.tensor(scales).double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", ["int8", "int8 rotated", "int4", "int4 rotated"])
@pytest.mark.parametrize("split_heads", [False, True], ids=["", "split heads"])
def test_the_center_of_a_head_is_subtracted_from_its_keys(
    backend: str, dtype: torch.dtype, format: str, split_heads: bool
) -> None:
    """The bits are those of keys from which float32 subtracted it before they were written."""
    dim, vectors = 80, draw_vectors(80, dtype)
    center = 3 * torch.randn(2, dim)
    chosen = FORMATS[format]
    assert chosen is not None
    formats = KVFormats(chosen._replace(centered=True), chosen)
    written = []
    for mean, given in ((center, vectors), (None, vectors.float() - center)):
        spec = LayerSpec(2, 2, dim, dim, k_mean=mean)
        layout = Layout(16, split_heads=split_heads)
        case = AttentionCase(BACKENDS[backend](), layout, spec, [CaseRow(0, len(given))], given.dtype, formats=formats)
        case.k, case.v = [given], [vectors.to(given.dtype)]
        case.write()
        written.append(case.pages.memory)
    assert torch.equal(*written)


# -------------------------------------------------------------------- attention
def store_and_read(case: AttentionCase) -> None:
    """Write the step, and replace the case's keys and values by what the stored ones are worth."""
    case.write()
    for row in range(len(case.rows)):
        block, slot = case.at.locate(case.at.table_row[row], torch.arange(len(case.k[row])))
        for part, plane in zip((case.k, case.v), case.store.planes(0), strict=True):
            stored = [each[block, :, slot] for each in (plane.numbers, plane.scale) if each is not None]
            part[row] = worth(*stored, rotated=plane.format.rotated)


def worth(numbers: Tensor, scale: Tensor | None = None, *, rotated: bool) -> Tensor:
    """Return what stored vectors are worth, in float64."""
    x = numbers.double()
    if scale is not None and numbers.dtype is torch.uint8:
        halves = [(both & 15, both >> 4) for both in numbers.split(GROUP // 2, -1)]
        scales = scale.double().unbind(-2)  # by group
        pairs = zip(halves, scales, strict=True)
        x = torch.cat([(each.double() - 8) * by[..., [i]] for half, by in pairs for i, each in enumerate(half)], -1)
    elif scale is not None:
        x = x * scale[..., None].double()
    return x @ hadamard(x.shape[-1]) if rotated else x


def make_case(
    backend: str, dtype: torch.dtype, pair: tuple[str, str], spec: LayerSpec, rows: list[CaseRow]
) -> AttentionCase:
    k, v = (FORMATS[name] or KVFormat(dtype) for name in pair)
    return AttentionCase(BACKENDS[backend](), Layout(16), spec, rows, dtype, formats=KVFormats(k, v))


@pytest.mark.parametrize(
    "spec",
    [
        LayerSpec(2, 14, 64, 64, scale=1 / 8),
        LayerSpec(1, 4, 128, 80, scale=1 / 11),
        LayerSpec(1, 2, 96, 128, scale=1 / 10, softcap=5.0, sink_logits=torch.tensor([0.0, 3.0])),
        LayerSpec(1, 2, 16, 256, scale=1 / 4, window=40),
    ],
    ids=["64", "128, 80", "96, 128, softcap, sinks", "16, 256, window"],
)
@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
def test_keys_and_values_may_have_formats_of_their_own(
    backend: str, dtype: torch.dtype, pair: tuple[str, str], spec: LayerSpec
) -> None:
    rows = [CaseRow(1100, 1), CaseRow(60, 1), CaseRow(0, 9), CaseRow(130, 40)]
    case = make_case(backend, dtype, pair, spec, rows)
    store_and_read(case)
    for i, (out, lse) in enumerate(case.attend_with_lse()):
        assert_close(out, expected(case, i, None), dtype)
        assert_close(lse, expected_lse(case, i, None), dtype)


@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
def test_bits_of_a_query_do_not_depend_on_others(backend: str, dtype: torch.dtype, pair: tuple[str, str]) -> None:
    spec, past, tokens = LayerSpec(2, 14, 80, 64, scale=1 / 9), 1020, 40
    case = make_case(backend, dtype, pair, spec, [CaseRow(past, tokens)])
    case.write()
    [together] = case.attend()
    for i in range(tokens):
        at, alone = case.make_slots([(0, past + i, 1)]), torch.empty_like(together[:1])
        case.ops.attend(alone, case.q[0][past + i : past + i + 1], case.store, 0, at, spec)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "model" not in pair], ids=", ".join)
def test_a_vector_that_is_not_finite_shows_where_it_is_seen_and_nowhere_else(
    backend: str, dtype: torch.dtype, pair: tuple[str, str], part: int
) -> None:
    spec, index = LayerSpec(1, 3, 64, 64, scale=1 / 8, window=30), 110
    case = make_case(backend, dtype, pair, spec, [CaseRow(100, 60)])
    case.write()
    [clean] = case.attend()
    number = 5
    (case.k, case.v)[part][0][index, 0, number] = torch.inf
    case.write()
    [out] = case.attend()
    query = torch.arange(100, 160)
    sees = (index <= query) & (query < index + 30)
    assert not out[sees][..., number].isfinite().any()
    assert torch.equal(out[~sees], clean[~sees])


def test_the_widest_heads_with_more_rows_than_go_together(backend: str, dtype: torch.dtype) -> None:
    case = make_case(
        backend, dtype, ("int4", "int4 rotated"), LayerSpec(1, 3, 256, 256, scale=1 / 16), [CaseRow(70, 60)]
    )
    store_and_read(case)
    [out] = case.attend()
    assert (out.double() - expected(case, 0, None)).abs().max() < TOLERANCE[dtype]

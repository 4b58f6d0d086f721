"""Validates the emulator with torch's own Metal kernels for attention over a KV cache, compared with float64."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metal_emulator import KernelFault, Library, Order, compile_shader

HEADERS = Path(torch.__file__).parent / "include"
DECODE = "ATen/native/mps/kernels/DecodeAttention.h"
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n#include <c10/metal/common.h>\n"
# Of the header's own 108 kernels those that are run: compiling all of them is the slow test.
INSTANCES = """
INSTANTIATE_SDPA_VECTOR_ONE(float, 128, 128, false, false, float, "_masknone")
INSTANTIATE_SDPA_VECTOR_ONE(half, 64, 64, true, false, float, "_masknone_causal")
INSTANTIATE_SDPA_VECTOR_ONE(bfloat, 256, 256, false, true, bool, "_maskbool")
INSTANTIATE_SDPA_VECTOR_2PASS_1_ONE(float, 128, 128, false, false, float, "_masknone")
INSTANTIATE_SDPA_VECTOR_2PASS_1_ONE(half, 64, 64, true, false, float, "_masknone_causal")
INSTANTIATE_SDPA_VECTOR_2PASS_1_ONE(bfloat, 256, 256, false, true, bool, "_maskbool")
INSTANTIATE_SDPA_VECTOR_AGGREGATION(float, 128)
INSTANTIATE_SDPA_VECTOR_AGGREGATION(half, 64)
INSTANTIATE_SDPA_VECTOR_AGGREGATION(bfloat, 256)
"""


class Case(NamedTuple):
    name: str
    dtype: torch.dtype
    dim: int
    mask: str
    keys: int
    heads: int
    kv_heads: int
    tolerance: float


CASES = [
    Case("float", torch.float32, 128, "_masknone", 300, 4, 2, 2e-6),
    Case("half", torch.float16, 64, "_masknone_causal", 77, 7, 1, 3e-3),
    Case("bfloat", torch.bfloat16, 256, "_maskbool", 50, 2, 2, 8e-3),
]


def source() -> str:
    """Return the header of torch with our instantiations instead of its own."""
    text = (HEADERS / DECODE).read_text()
    templates = text[: text.index("INSTANTIATE_SDPA_VECTOR_HEADS(float)")]
    return f'{HEAD}#line 1 "DecodeAttention.h"\n{templates}\n{INSTANCES}\n#endif\n'


class Problem:
    """Queries, keys and values of two sequences; several queries each for causal masks."""

    def __init__(self, case: Case) -> None:
        self.case, self.batch, self.queries = case, 2, 3 if "causal" in case.mask else 1
        make = torch.Generator().manual_seed(0)
        shape = (self.batch, case.heads, self.queries, case.dim)
        self.q = torch.randn(shape, generator=make).to(case.dtype)
        kv = (self.batch, case.kv_heads, case.keys, case.dim)
        self.k, self.v = (torch.randn(kv, generator=make).to(case.dtype) for _ in range(2))
        self.mask = torch.rand(case.keys, generator=make) > 0.3

    def wanted(self) -> Tensor:
        mask = self.mask
        if "causal" in self.case.mask:
            mask = torch.ones(self.queries, self.case.keys).tril().bool()
        elif "none" in self.case.mask:
            mask = torch.ones(self.case.keys).bool()
        return F.scaled_dot_product_attention(
            self.q.double(), self.k.double(), self.v.double(), attn_mask=mask.expand(self.queries, -1), enable_gqa=True
        )

    def common(self) -> tuple[Tensor | int | float, ...]:
        """Return the last arguments, which both kernels share."""
        q, k, v = self.q, self.k, self.v
        strides = [_ints(q.stride(d), k.stride(d), v.stride(d), self.case.heads if d == 0 else 0) for d in (1, 2, 0)]
        mask = self.mask if "bool" in self.case.mask else torch.zeros(1)
        return (
            *(self.case.heads // self.case.kv_heads, self.case.keys, strides[0], strides[1]),
            *(self.case.dim**-0.5, mask, _ints(1, 0, 0, 0), strides[2]),
        )


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def one_pass(library: Library, problem: Problem) -> Tensor:
    case, out = problem.case, torch.empty_like(problem.q)
    kernel = getattr(library, f"sdpa_vector_{case.name}_{case.dim}_{case.dim}{case.mask}")
    threads = (problem.batch * case.heads * 1024, problem.queries, 1)
    kernel(problem.q, problem.k, problem.v, out, *problem.common(), threads=threads, group_size=(1024, 1, 1))
    return out


def two_passes(library: Library, problem: Problem) -> Tensor:
    case, out = problem.case, torch.empty_like(problem.q)
    rows = problem.batch * case.heads
    parts = torch.empty(rows * problem.queries, 32, case.dim, dtype=case.dtype)
    sums, tops = torch.empty(rows * problem.queries, 32), torch.empty(rows * problem.queries, 32)
    first = getattr(library, f"sdpa_vector_2pass_1_{case.name}_{case.dim}_{case.dim}{case.mask}")
    threads = (rows * 256, problem.queries, 32)
    args = (problem.q, problem.k, problem.v, parts, sums, tops, *problem.common())
    first(*args, threads=threads, group_size=(256, 1, 1))
    second = getattr(library, f"sdpa_vector_2pass_2_{case.name}_{case.dim}")
    second(parts, sums, tops, out, threads=(rows * 1024, problem.queries, 1), group_size=(1024, 1, 1))
    return out


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "checked"])
def library(request: pytest.FixtureRequest) -> Library:
    return compile_shader(source(), include=[HEADERS], checked=request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_pass(library: Library, case: Case) -> None:
    problem = Problem(case)
    assert (one_pass(library, problem).double() - problem.wanted()).abs().max() < case.tolerance


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_passes(case: Case) -> None:
    problem = Problem(case)
    out = two_passes(compile_shader(source(), include=[HEADERS]), problem)
    assert (out.double() - problem.wanted()).abs().max() < case.tolerance


def test_every_order_gives_the_same_bits() -> None:
    problem = Problem(CASES[1])
    out = [
        two_passes(compile_shader(source(), include=[HEADERS], order=order, seed=1), problem)
        for order in (Order.FORWARD, Order.REVERSED, Order.RANDOM)
    ]
    assert out[0].equal(out[1])
    assert out[0].equal(out[2])


def test_all_lanes_write_one_sum() -> None:
    """In the first pass 32 lanes write the same number to the same place: a harmless race, but a race."""
    checked = compile_shader(source(), include=[HEADERS], checked=True)
    with pytest.raises(KernelFault, match=r"data race on argument 4 'sums', element \d+ .* DecodeAttention.h:\d+"):
        two_passes(checked, Problem(CASES[0]))


@pytest.mark.slow
def test_the_header_as_it_is() -> None:
    library = compile_shader(f"{HEAD}#include <{DECODE}>\n", include=[HEADERS])
    assert len(dir(library)) == 108
    problem = Problem(CASES[0])
    assert (one_pass(library, problem).double() - problem.wanted()).abs().max() < CASES[0].tolerance

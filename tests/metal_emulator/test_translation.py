"""Translation of assignments and of ambiguous syntax: swizzles, members, pointers, calls."""

from __future__ import annotations

import pytest
import torch

from metal_emulator import compile_shader

HEAD = '#include <metal_stdlib>\nusing namespace metal;\n#line 1 "k.metal"\n'


def result(body: str, *, helpers: str = "", size: int = 4) -> list[int]:
    """Run a kernel with one thread; return out[0], out[1], ..."""
    kernel = f"kernel void k(device int* out, uint i [[thread_position_in_grid]]) {{\n{body}\n}}\n"
    out = torch.zeros(size, dtype=torch.int32)
    compile_shader(HEAD + helpers + kernel, checked=True).k(out, threads=1, group_size=1)
    return out.tolist()


# Of int4 v = (13, 6, 7, 9), what v.zx (7, 13) becomes with int2(2, 3), as Python computes it.
ASSIGNMENTS = {
    "=": (2, 3),
    "+=": (9, 16),
    "-=": (5, 10),
    "*=": (14, 39),
    "/=": (3, 4),
    "%=": (1, 1),
    "&=": (7 & 2, 13 & 3),
    "|=": (7 | 2, 13 | 3),
    "^=": (7 ^ 2, 13 ^ 3),
    "<<=": (7 << 2, 13 << 3),
    ">>=": (7 >> 2, 13 >> 3),
}


def test_every_assignment_to_a_swizzle() -> None:
    lines = [f"v = int4(13, 6, 7, 9); v.zx {each} int2(2, 3); p[{n}] = v;" for n, each in enumerate(ASSIGNMENTS)]
    body = "int4 v; device int4* p = (device int4*)out;\n" + "\n".join(lines)
    found = result(body, size=4 * len(lines))
    assert found == [value for z, x in ASSIGNMENTS.values() for value in (x, 6, z, 9)]


def test_swizzles_count() -> None:
    body = """int4 v = int4(1, 2, 3, 4);
    v.xy++; v.w--; v.zw &= 6; ++v; const int4 before = v--;
    device int4* p = (device int4*)out; p->wzyx = v; p[1] = before;
    p[2] = int4(int2(v.xy >= v.yx), int2(v.xy < v.yx));"""
    # (2, 3, 3, 3), then z and w & 6: (2, 3, 2, 2)
    assert result(body, size=12) == [2, 2, 3, 2, 3, 4, 3, 3, 0, 1, 1, 0]


@pytest.mark.parametrize(
    "statement",
    ["(v.xy) = int2(1);", "v.zw[1] = 9;", "v.wzyx.xy = int2(1);", "++v.xy;", "w.xy = v.zw = int2(1);", "v.zw.x = 1;",
     "(v.xy)++;", "v.xx = int2(1);", "thread int2& r = v.xy; r = int2(1);"],
)  # fmt: skip
def test_what_cannot_be_assigned_to_is_refused(statement: str) -> None:
    with pytest.raises(SyntaxError, match=r"k.metal:3: "):
        result(f"int4 v = int4(1), w = v;\n{statement}\nout[i] = v.x + w.x;")


def test_a_part_of_a_swizzle_is_a_copy() -> None:
    with pytest.raises(
        SyntaxError, match=r"k.metal:3: a part of '.zw' is assigned, which is a copy: assign to the comp"
    ):
        result("int4 v = int4(1);\nv.zw[1] = 9;")


def test_members_that_look_like_swizzles() -> None:
    helpers = """struct S { float2 xy; int bar[2], ab; thread int2& rg() thread { return both; } int2 both;
      int sum() const { return this->ab + ab; } };
    template <class T> struct Pair { T zw; };
    struct Outer { S inner; Pair<int> pair; };
    S made(int n) { S s; s.ab = n; s.xy = float2(n, 1); return s; }
    """
    body = """S s = made(5); thread S* p = &s; S many[2] = {s, s};
    p->bar[1] = 3; (*p).ab += 2; s.rg() = int2(4);
    Outer o; o.inner = s; o.pair.zw = 8; many[1].xy.y = 6;
    float4 v = float4(1, 2, 3, 4); v.xy = s.xy; v.zw += v.xy.yx;
    out[0] = s.ab + s.bar[1] + o.inner.ab; out[1] = o.pair.zw + s.sum(); out[2] = many[1].xy.yx.x + made(20).ab;
    out[3] = int(v.x + 10 * v.y + 100 * v.z + 1000 * v.w);"""
    assert result(body, helpers=helpers) == [7 + 3 + 7, 8 + 14, 6 + 20, 5 + 10 + 400 + 9000]


def test_pointers_into_memory_of_a_threadgroup_are_no_variables() -> None:
    helpers = """inline int at(threadgroup int* tile, uint n) {
      threadgroup int* p = &tile[n]; threadgroup int& r = tile[n + 1]; return *p + 10 * r; }
    """
    body = """threadgroup int tile[2 * 4], t[2], rows[2][2]; for (int n = 0; n < 8; ++n) tile[n] = n;
    t[1] = 2;
    threadgroup int* p = &tile[3];
    threadgroup int* q = tile + t[1];
    threadgroup int& r = tile[4];
    threadgroup int (*row)[2] = &rows[1];
    threadgroup int* both[2] = {p, q};
    (*row)[1] = 7;
    out[0] = *p; out[1] = *q + *both[1]; out[2] = r + rows[1][1]; out[3] = at(tile, 5);"""
    assert result(body, helpers=helpers) == [3, 4, 11, 65]


def test_a_variable_is_no_call() -> None:
    helpers = "struct h { float v; h(float x) : v(x * 2) {} }; float g(float x) { h g(x); return g.v; }\n"
    assert result("out[0] = int(g(4.0f));", helpers=helpers)[0] == 8
    with pytest.raises(SyntaxError, match="'g' calls itself"):
        result("", helpers="float g(float x) { if (x > 1) return g(x - 1); else return 1; }\n")

"""The check by clang with address spaces refuses what Apple's compiler refuses and g++ accepts, and nothing else.

That clang is not installed with the tests, so tests that need it are marked slow (`pip install kvmux[metal-check]`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels
from kernels.metal.source import FOLDER, assemble_source
from kernels.selfcheck.check import check_ops
from metal_emulator import CompilerMissing
from metal_emulator.__main__ import list_type_sets, main
from metal_emulator.address_spaces import Clang

HEAD = '#include <metal_stdlib>\nusing namespace metal;\n#line 1 "k.metal"\n'
PARAMETERS = "device float* o, const device float* x, constant float& s, uint i [[thread_position_in_grid]]"
KERNEL = f"kernel void k({PARAMETERS}) {{{{\n{{}}\n}}}}\n"
STRUCT = "struct S { float a; float twice() const { return 2 * a; } }; "
TORCH = Path(torch.__file__).parent / "include"


@pytest.fixture(scope="module")
def clang() -> Clang:
    try:
        return Clang.find()
    except CompilerMissing as error:
        pytest.skip(str(error))


def refused(clang: Clang, text: str) -> str:
    with pytest.raises(SyntaxError) as raised:
        clang.check(HEAD + text)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("constant float* p = x; o[i] = p[0];", "cannot initialize a variable of type 'const constant float *'"),
        ("thread float* p = &o[i]; *p = 1;", "cannot initialize a variable of type 'float *' with an rvalue of type"),
        ("const device float* p = i ? x : &s; o[i] = p[0];", "incompatible operand types ('device float const *' and"),
        ("o[i] = ((constant float*)x)[i];", "a cast cannot change the address space"),
        ("threadgroup float t[4]; *(device float*)(t + 1) = 1;", "a cast cannot change the address space"),
        ("o[i] = *reinterpret_cast<const threadgroup float*>(x);", "reinterpret_cast from 'device float const *' to"),
        ("x[i] = 1;", "read-only variable is not assignable"),
        ("device float v; v = 1; o[i] = v;", "automatic variable qualified with an address space"),
        ("static float v; o[i] = v;", "a static variable must be a constant"),
        ("threadgroup float t = 0; o[i] = t;", "'t': a threadgroup variable has no initialiser"),
        ("threadgroup float a[4096]; threadgroup float b[4097]; o[i] = a[i] + b[i];", "Metal has 32768 bytes of thr"),
        ("if (i) { threadgroup float a[8193]; o[i] = a[i]; }", "Metal has 32768 bytes of threadgroup memory"),
        ("o[i] = simd_foo(x[i]);", "use of undeclared identifier 'simd_foo'"),
        ("o[i] = min(i, 3);", "call to 'min' is ambiguous"),
        ("int e; o[i] = modf(x[i], e);", "no matching function for call to 'modf'"),
        ("o[i] = modf(x[i], o[i]);", "no matching function for call to 'modf': cannot bind reference in device"),
        ("atomic_int a; atomic_fetch_add_explicit(&a, 1, memory_order_relaxed);", "no matching function for call to"),
        ("half2 h = {x[i], x[i]}; o[i] = h.x;", "non-constant-expression cannot be narrowed from type 'device float'"),
        ("bfloat b = x[i]; o[i] = b;", "no viable conversion from 'const float' to 'bfloat'"),
        ("float v[i]; o[i] = v[0];", "variable length arrays"),
        ("float v; o[i] = v;", "variable 'v' is uninitialized when used here"),
        ("o[i] = float4(1, 2, 3).x;", "a vector has another number of components"),
        ("double d = 2; o[i] = d;", "'double': Metal has no double"),
        ("if constexpr (sizeof(int) == 4) o[i] = 1;", "constexpr if is a C++17 extension"),
    ],
)
def test_in_a_kernel(clang: Clang, body: str, told: str) -> None:
    assert refused(clang, KERNEL.format(body)).startswith(f"k.metal:2: {told}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("helper", "told"),
    [
        (
            "float f(const thread float* p) { return *p; }",
            "cannot pass pointer to device as a pointer to thread in 1st",
        ),
        (
            "float f(const threadgroup float* p) { return *p; }",
            "cannot pass pointer to device as a pointer to threadgr",
        ),
    ],
)
def test_arguments_of_another_space(clang: Clang, helper: str, told: str) -> None:
    message = refused(clang, f"{helper}\n" + KERNEL.format("o[i] = f(x + i);"))
    assert message.startswith("k.metal:3: no matching function for call to 'f'")
    assert told in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("float f(const float* p) { return p[0]; }", "'const float*': a pointer or reference needs an address space"),
        ("float f() { threadgroup float t[32]; return t[0]; }", "'t': a threadgroup variable belongs into the kernel"),
        ("template <class T> T f(const thread T* p) { return *p; } "
         "kernel void h(device float* o) { o[0] = f(o); }", "'T' cannot be a type with an address space"),
        ("float g = 1.0f;", "a variable outside functions must be a constant"),
        ("constant float g;", "default initialization of an object of const type 'const constant float'"),
        ("struct S { static constexpr int N = 3; };", "a static variable must be a constant"),
        ("float f(int n) { return n < 1 ? 1.0f : f(n - 1) * n; }", "'f' calls itself: Metal has no recursion"),
        ("struct S { int f(int n) { return f(n); } };", "all paths through this function will call itself"),
        ("float f(float (*g)(float)) { return g(1); }", "'g': Metal has no function pointers"),
        ("float f(float v) { if (v > 0) return v; }", "non-void function does not return a value in all control"),
        ("struct S { half a; }; S f(float v) { return S{v}; }", "non-constant-expression cannot be narrowed from type"),
        ("kernel void h(threadgroup float* t) { *t = 1; }", "'threadgroup float* t': a buffer lies in device"),
        ("kernel void h(device float* o, uint2 a [[thread_position_in_grid]], uint3 b [[threads_per_grid]]) {}",
         "kernel 'h' has positions of 2 and of 3 dimensions"),
        (STRUCT + "kernel void h(device S* s) { s[1].a = s->twice(); }", "a member function is called on what"),
        (STRUCT + "kernel void h(device S* s, constant S& t) { s->a = t.twice(); }", "a member function is called on"),
        (STRUCT + "kernel void h(const device S* s) { S t = s[1]; s[0] = t; }", "no viable overloaded '='"),
        ("struct S { float a = 1; }; kernel void h(device float* o) { threadgroup S s[2]; o[0] = s[0].a; }",
         "a threadgroup variable has no initialiser, its type's members neither"),
        ("template <int N> kernel void h(device float* o) { threadgroup float t[N]; o[0] = t[0]; } "
         'template [[host_name("h")]] [[kernel]] decltype(h<8193>) h<8193>;', "Metal has 32768 bytes of threadgroup"),
        ("float f(thread float* p) { return *p; } struct S { float a[4]; float g() { return f(a + 1); } };",
         "'a': a member array is not a pointer to thread from Metal 4.1 on"),
        ("template <class T> T f(T v) { return simd_foo(v); } template float f(float);", "use of undeclared"),
    ],
)  # fmt: skip
def test_outside_kernels(clang: Clang, text: str, told: str) -> None:
    assert refused(clang, text).startswith(f"k.metal:1: {told}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "((device float*)x)[i] = 1; o[i] = *(const device float*)(ulong(x) + 4);",
        "o[i] = *(const device float*)(const device char*)&x[i] + *(device float*)(ulong)o + ((device float4*)o)[i].x;",
        "o[i] = x[i] * 2.0; half h = 1.5h; h += half(s) * 2.0; o[i] += h;",
        "bfloat b = bfloat(x[i]); b = b * b; b += 1.5bf; o[i] = b;",
        "float4 a = float4(1); half4 h = half4(a); a.xy = a.zw; o[i] = dot(a, float4(h)) + vec<float, 3>(a.xy, 1).z;",
        "constexpr int N = 4; threadgroup half4 t[N][2]; threadgroup half4* p = *t; *p = half4(1); o[i] = t[1][0].x;",
        "threadgroup atomic_uint n; atomic_store_explicit(&n, 0, memory_order_relaxed);",
        "int e; float c; o[i] = frexp(x[i], e) + sincos(x[i], *(thread float*)&e) + sincos(x[i], c) + c;",
        "bool2 b = bool2(true, i > 3); o[i] = b.x && any(float2(1) < float2(x[i])) ? simd_sum(x[i]) : 0;",
        "threadgroup float t[8192]; t[i] = 1; o[i] = t[0];",
        "struct S { float a[4]; float f(int n) { float b[4]; for (int m = 0; m < 4; m++) b[m] = a[m]; return b[n]; } };"
        "S t; t.a[1] = x[i]; const thread float* p = t.a; o[i] = t.f(1) + *p;",
    ],
)
def test_what_passes(clang: Clang, body: str) -> None:
    clang.check(HEAD + KERNEL.format(body))


@pytest.mark.slow
def test_structs_are_copied_from_every_space_to_every_space(clang: Clang) -> None:
    """Aggregates, structs with initialisers, with constructors, and templates."""
    clang.check(
        HEAD
        + STRUCT
        + """
template <int N> struct Outer { S inner; float b[N] = {1}; float sum() const { return inner.twice() + b[0]; } };
struct Made { float a; Made(float v) : a(v) {} };
constant constexpr S FIRST = {1.5f};
inline float of(Outer<2> s) { return s.sum(); }
kernel void k(device S* d, constant S& c, device Outer<2>* outer, constant Outer<2>& other, constant Made& made) {
  threadgroup S t[2];
  const S s = c, braced = {2}, all[2] = {d[0], FIRST};
  S assigned = d[1];
  assigned = t[0];
  d[0] = s;
  d[1] = d[2];
  t[0] = c;
  t[1] = braced;
  Made copy = made;
  outer[0].b[0] = of(other) + of(outer[1]) + all[1].twice() + assigned.twice() + copy.a;
}
"""
    )


@pytest.mark.slow
def test_every_instantiation_is_looked_at_and_lines_are_the_sources(clang: Clang) -> None:
    text = """
template <typename T> float first(const device T* p) { return p[0]; }
template <typename T>
[[kernel, max_total_threads_per_threadgroup(64)]] void k(device float* o [[buffer(0)]],
    constant T* x [[buffer(1)]]) {
  o[0] =
    first(x);
}
template [[host_name("k_half")]] [[kernel]] decltype(k<half>) k<half>;
#line 7 "other.metal"
template [[host_name("k_float")]] kernel void k<float>(device float* o [[buffer(0)]], constant float* x [[buffer(1)]]);
"""
    assert refused(clang, text).startswith("k.metal:7: no matching function for call to 'first'")
    clang.check(HEAD + text.replace("constant T*", "device T*").replace("constant float*", "device float*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "header", ["ATen/native/mps/kernels/DecodeAttention.h", "ATen/native/mps/kernels/GridSampler.h"]
)
def test_torchs_own_kernels_pass(clang: Clang, header: str) -> None:
    """Apple's compiler accepts them, as they are in every wheel for macOS."""
    clang.check(f"{HEAD}#include <c10/metal/common.h>\n#include <{header}>\n", [TORCH])


@pytest.mark.slow
def test_our_kernels_pass(clang: Clang, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith(f"{len([*FOLDER.glob('*.metal')])} files: nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong", "told"),
    [
        ("decode", "read_numbers(thread float* to", "read_numbers(device float* to", "decode.metal:"),
        ("store", "  Layout layout;\n  int head;", "  constant Layout& layout;\n  int head;", "slots.h:"),
        ("norms", "threadgroup float* sums", "thread float* sums", "norms.metal:"),
        ("store", "*(device float*)(to + n)", "*(thread float*)(to + n)", "store.metal:"),
        ("linear", "row_at(const device T* x", "row_at(constant T* x", "linear.h:"),
    ],
)  # fmt: skip
def test_ours_do_not_pass_with_another_space(clang: Clang, file: str, right: str, wrong: str, told: str) -> None:
    text = assemble_source(file, {"T": torch.float16, "K": torch.int8, "V": torch.int8, "W": torch.float32})
    assert right in text
    with pytest.raises(SyntaxError, match=rf"^{told}\d+: "):
        clang.check(text.replace(right, wrong))


@pytest.mark.slow
def test_what_is_refused_is_printed(clang: Clang, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "helper.h").write_text("inline float f(const thread float* p) { return p[0]; }\n")
    file = tmp_path / "one.metal"
    file.write_text(f'#include <metal_stdlib>\n#include "helper.h"\n{KERNEL.format("o[i] = f(x);")}')
    assert main([str(file)]) == 1
    assert capsys.readouterr().out.startswith(f"{file}:4: no matching function for call to 'f': cannot pass pointer")
    assert main([str(tmp_path / "two.metal")]) == 2
    assert "two.metal" in capsys.readouterr().err


def test_no_clang(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 2
    assert "pip install ziglang" in capsys.readouterr().err


def test_all_that_the_backend_compiles_is_looked_at() -> None:
    """The self-check calls every operation with every dtype of activations; nothing is computed here."""
    looked_at = {
        assemble_source(file.stem, types) for file in FOLDER.glob("*.metal") for types in list_type_sets(file.stem)
    }
    compiled = set()

    class Recorded:
        def __init__(self, text: str) -> None:
            compiled.add(text)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments, **sizes: None

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_ops(MetalOps(Kernels(Recorded)), dtype, torch.device("cpu"))
    assert compiled <= looked_at
    assert {text.split('#line 1 "')[1].split('"')[0] for text in compiled} == {f.name for f in FOLDER.glob("*.metal")}

"""The rules refuse what C++ accepts and Metal does not, with the line and what to write instead."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from metal_emulator import CompilerMissing, compile_shader

HEAD = '#include <metal_stdlib>\nusing namespace metal;\n#line 1 "k.metal"\n'
KERNEL = "kernel void k(device float* o, const device float* x, uint i [[thread_position_in_grid]]) {{\n{}\n}}\n"


def refused(source: str) -> str:
    with pytest.raises(SyntaxError) as raised:
        compile_shader(HEAD + source)
    return str(raised.value)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("double d = x[i]; o[i] = float(d);", "'double': Metal has no double: write float"),
        ("if (i > 3) goto end;\no[i] = 1;\nend: return;", "'goto': Metal has no goto: write a loop or a condition"),
        ("o[i] = *new float(1);", "'new': Metal has no memory to allocate: declare an array of a fixed size"),
        ("throw 1;", "'throw': Metal has no exceptions"),
        ("try { o[i] = 1; } catch (...) { }", "'try': Metal has no exceptions"),
        ("o[i] = std::exp(x[i]);", "'std': Metal has no std: write metal::"),
        ("thread_local int n; o[i] = n;", "'thread_local': Metal has no thread_local"),
        ("long long n = i; o[i] = n;", "'long long': Metal's long has 64 bits: write long"),
        ("int half = 1; o[i] = half;", "'half' is a type in Metal: choose another name"),
        ('printf("%f", x[i]);', "'printf': Metal kernels cannot print"),
        ("assert(i < 3);", "'assert': Metal kernels cannot assert"),
        ("float (*f)(float) = fabs; o[i] = f(x[i]);", "'f': Metal has no function pointers: use a template parameter"),
        ("auto f = [&](float v) { return v; };\no[i] = f(x[i]);", "Metal 3 has no lambdas: write a function"),
        ("threadgroup float t = 0; o[i] = t;", "'t': a threadgroup variable has no initialiser: assign it"),
        ("const float* p = &x[i]; o[i] = *p;", "'const float*': a pointer or reference needs an address space"),
        ("o[i] = *(float*)(ulong(x));", "'float*': a pointer or reference needs an address space"),
        ("auto& v = o[i]; v = 1;", "'auto&': a pointer or reference needs an address space"),
    ],
)  # fmt: skip
def test_in_a_kernel(body: str, told: str) -> None:
    assert refused(KERNEL.format(body)).startswith(f"k.metal:2: {told}")


@pytest.mark.parametrize(
    ("helper", "told"),
    [
        ("float f() { threadgroup float t[32]; return t[0]; }", "'t': a threadgroup variable belongs into the kernel"),
        ("float f(const float* p) { return p[0]; }", "'const float*': a pointer or reference needs an address space"),
        ("void f(float4& v) { v = 1; }", "'float4&': a pointer or reference needs an address space"),
        ("struct S { float a; }; float f(S& s) { return s.a; }", "'S& s': a pointer or reference needs"),
        ("template <class T> T f(const T& v) { return v; }", "'const T& v': a pointer or reference needs"),
        ("float f(int n) { return n < 1 ? 1.0f : f(n - 1) * n; }", "'f' calls itself: Metal has no recursion"),
        ("int g(int); int f(int n) { return g(n); } int g(int n) { return f(n); }", "'f' calls itself"),
        ("float counter = 1.0f;", "a variable outside functions must be a constant: write constant before its type"),
        ("static const float ONE = 1.0f;", "a variable outside functions must be a constant"),
        ("threadgroup float shared_[32];", "a variable outside functions must be a constant"),
        ("struct S { virtual float f(); };", "'virtual': Metal has no virtual functions: use a template"),
        ("constant bool FLAG [[function_constant(0)]];", "'function_constant': compile_shader cannot set"),
        ("kernel void h(threadgroup float* t [[threadgroup(0)]]) {}", "[[threadgroup(n)]]: compile_shader cannot size"),
        ("kernel void h(device float* a [[buffer(0)]], device float* b [[buffer(2)]]) {}", "kernel 'h' has no buffer"),
        ("kernel void h(device float* a [[buffer(0)]], device float* b [[buffer(0)]]) {}", "buffer 0 has two"),
        ("kernel void h(device float* a, uint i) {}", "parameter 'i' of kernel 'h' is bound to nothing"),
        ("kernel void h(" + ", ".join(f"device float* a{i}" for i in range(32)) + ") {}", "kernel 'h' has 32 buffers"),
        ("kernel void h(device float* a) {" + "".join(f"threadgroup int t{i};" for i in range(65)) + "}",
         "kernel 'h' has 65 threadgroup variables, but the emulator allows 64: put some into a struct or an array"),
        ("#define N 4\ntemplate <int n> [[max_total_threads_per_threadgroup(n)]] kernel void h(device float* a) {}",
         "write a number into [[max_total_threads_per_threadgroup(...)]]"),
    ],
)  # fmt: skip
def test_outside_kernels(helper: str, told: str) -> None:
    message = refused(f"\n\n{helper}\n" + KERNEL.format("o[i] = x[i];"))
    line = 3 + helper.count("\n")
    assert message.splitlines()[0].startswith(f"k.metal:{line}: {told}"), message


def test_all_faults_are_told() -> None:
    message = refused(KERNEL.format("double a = 1;\nlong long b = 2;\no[i] = a + b;"))
    assert [line.split(":")[1] for line in message.splitlines()] == ["2", "3"]


def test_characters_that_torch_cannot_pass() -> None:
    with pytest.raises(SyntaxError, match=r"program_source:2: compile_shader takes ASCII alone, in comments as well"):
        compile_shader("#include <metal_stdlib>\n// \N{MULTIPLICATION SIGN}\n")
    assert refused("\n// \N{MULTIPLICATION SIGN}\n").startswith("k.metal:2: compile_shader takes ASCII alone")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("o[i] = y[i];", r"k.metal:2: ('y' was not declared|use of undeclared identifier 'y')"),
        ("\n  x[i] = 1;", r"k.metal:3: .*read-only"),
        ("bfloat b = bfloat(1.0f); b = x[i];", r"k.metal:2: no (match for|viable overloaded)"),
        ("o[i] = simd_sum(bfloat(1.0f));", "simd operations take no bfloat: convert it to float"),
        ("o[i] = simd_sum(long(i));", "simd operations take numbers of up to 32 bits"),
        ("threadgroup float t[i]; o[i] = t[0];", "k.metal:2:"),
        ("o[i] = float4(1, 2, 3).x;", "a vector has another number of components"),
    ],
)  # fmt: skip
def test_what_the_compiler_refuses(body: str, told: str) -> None:
    assert re.search(told, refused(KERNEL.format(body)).replace("‘", "'").replace("’", "'"))


def test_broken_sources() -> None:
    assert "is never closed" in refused("kernel void k(device float* o) { o[0] = 1;")
    assert "k.metal:1: " in refused('#include "nothing.h"\n')
    assert "unbalanced" in refused("#error unbalanced\n")


def test_headers_are_found(tmp_path: Path) -> None:
    (tmp_path / "twice.h").write_text("#pragma once\ninline float twice(float v) { return 2 * v; }\n")
    source = HEAD + '#include "twice.h"\n' + KERNEL.format("o[i] = twice(x[i]);")
    out = torch.zeros(4)
    compile_shader(source, include=[tmp_path]).k(out, torch.ones(4))
    assert out.eq(2).all()
    (tmp_path / "twice.h").write_text("#pragma once\ninline float twice(float v) { double d = v; return 2 * d; }\n")
    with pytest.raises(SyntaxError, match=r"twice.h:2: 'double'"):
        compile_shader(source, include=[tmp_path])


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerMissing, match="install g\\+\\+ or clang\\+\\+"):
        compile_shader(HEAD)


def test_the_cache_is_filled_and_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = HEAD + KERNEL.format("o[i] = x[i] + 4321;")
    for _ in range(2):
        out = torch.zeros(3)
        compile_shader(source).k(out, torch.ones(3))
        assert out.eq(4322).all()
    made = sorted(path.suffix for path in (tmp_path / "kvmux/metal-emulator").iterdir())
    assert made == ["", ".sha256", ".sha256", ".so", ".so"], "headers, the runtime and the library; nothing half done"

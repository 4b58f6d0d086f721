"""Missing or failing compilers, and a cache that is damaged or not writable."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
from pathlib import Path

import pytest
import torch

from kernels.device import KernelsMissing
from kernels.metal.runtime import load_emulated
from metal_emulator import Compiler, CompilerMissing, compile_shader

KERNEL = "#include <metal_stdlib>\nkernel void one(device float* out) { out[0] = 1; }"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache, with no compiler in PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "bin").mkdir()
    return tmp_path


def command(folder: Path, name: str, script: str) -> str:
    """Make a program that runs these lines of shell; return its path."""
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def runs() -> None:
    out = torch.zeros(1)
    compile_shader(KERNEL).one(out)
    assert out == 1


def test_a_compiler_that_fails_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(folder, "g++", "echo 'no developer tools were found' >&2; exit 1")
    command(folder, "clang++", "echo 'clang version 99'")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/nowhere")
    assert Compiler.find() == Compiler(("clang++",), "clang version 99")


@pytest.mark.parametrize("cxx", ["false", "true", "g++-that-is-not-there", '"g++', " ", "/"])
def test_every_compiler_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, cxx: str) -> None:
    command(folder, "g++", "echo 'no developer tools were found' >&2; exit 1")
    command(folder, "true", "")
    command(folder, "false", "exit 1")
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(
        CompilerMissing, match=r"install g\+\+ or clang\+\+.*no developer tools.*'clang\+\+' is not"
    ) as e:
        Compiler.find()
    assert f"'{cxx}" in str(e.value)


def test_a_compiler_of_nothing_is_told_before_it_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = 'if [ "$1" = --version ]; then echo broken 1.0; else echo "cannot compile" >&2; exit 1; fi'
    monkeypatch.setenv("CXX", command(folder, "broken", version))
    load_emulated.cache_clear()
    with pytest.raises(KernelsMissing, match=r"broken' cannot compile what .*install g\+\+.*cannot compile"):
        load_emulated()


@pytest.mark.parametrize("damage", [0, 5000, None])
def test_what_is_damaged_is_compiled_again(folder: Path, damage: int | None) -> None:
    """A file that is empty, truncated (loading it would end the process), or garbage."""
    compiler = Compiler.find()
    built = compiler.build_library("", checked=False, ucontext=False)
    for library in built:
        library.write_bytes(b"garbage" if damage is None else library.read_bytes()[:damage])
        assert compiler.build_library("", checked=False, ucontext=False) == built
        ctypes.CDLL(str(library))
    assert not list((folder / "cache").rglob("build-*"))


def test_what_cannot_be_loaded_is_told_before_it_is_used(folder: Path) -> None:
    """As with a folder that is mounted noexec."""
    built = Compiler.find().build_library("", checked=False, ucontext=False)
    built.kernels.write_bytes(b"whole, and no library")
    built.kernels.with_suffix(".sha256").write_text(hashlib.sha256(built.kernels.read_bytes()).hexdigest())
    load_emulated.cache_clear()
    with pytest.raises(KernelsMissing, match="cannot be loaded: set XDG_CACHE_HOME to a folder of this machine"):
        load_emulated()


@pytest.mark.parametrize("home", ["/proc/nope", "/dev/null/nope"])
def test_a_cache_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    with caplog.at_level(logging.WARNING):
        runs()
        runs()
    (record,) = caplog.records
    assert home in record.message
    assert "set XDG_CACHE_HOME to a folder" in record.message


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    load_emulated.cache_clear()
    with pytest.raises(KernelsMissing, match="set TMPDIR to one"):
        load_emulated()


def test_a_relative_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    runs()
    assert list((folder / "relative/kvmux/metal-emulator").glob("runtime-*.so"))

"""Compiles C++ to a library and loads it: finds a compiler, and caches libraries in the user's cache folder.

The name of a cached library is a hash of all that it is made of. Knows neither Metal nor launches.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
# Names of headers that a Metal source may include. While it is preprocessed they are empty files; include/metal_stdlib
# replaces all of them later.
HEADERS = (
    "metal_stdlib",
    "metal_array",
    "metal_atomic",
    "metal_common",
    "metal_compute",
    "metal_geometric",
    "metal_integer",
    "metal_limits",
    "metal_math",
    "metal_numeric",
    "metal_pack",
    "metal_relational",
    "metal_simdgroup",
    "metal_type_traits",
    "metal_types",
    "metal_uniform",
)
DEFINES = ("-D__METAL__", "-D__METAL_VERSION__=310", "-D__HAVE_BFLOAT__")
_LANGUAGE = ("-x", "c++", "-std=gnu++14")
_CODE = ("-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-strict-aliasing")
_KERNELS = ("-w", "-Werror=return-type", "-Werror=vla", "-ffp-contract=off", "-fsigned-char", "-fno-threadsafe-statics")
_CHECKED = ("-O1", "-g1", "-gdwarf-4", "-fsanitize=thread", "-DEMULATOR_CHECKED")
# This option fills a thread's variables with garbage until they are assigned; since g++ 12 and clang++ 8.
_FILL_VARIABLES = "-ftrivial-auto-var-init=pattern"
_PREFIX = "build-"  # beginning of the name of a folder in which a library is compiled; debug information has its paths
_BUILD_FOLDER = re.compile(rf"^.*/{_PREFIX}[^/]*/")
_ERROR = re.compile(r"^(?:\./)?([^\s:][^:\n]*:\d+):(?:\d+:)? (?:fatal )?error: (.*)$", re.MULTILINE)


_LOG = logging.getLogger(__name__)
_INSTALL = "install g++ or clang++ (on a Mac: xcode-select --install), or name one in CXX"


class CompilerMissing(Exception):
    """Raised if no C++ compiler can be used; the message says which were tried and what to install."""


class BuiltLibraries(NamedTuple):
    """The paths of two shared libraries: the kernels', and the runtime's, whose functions the kernels call."""

    kernels: Path
    runtime: Path

    def load(self) -> tuple[ctypes.CDLL, ctypes.CDLL]:
        """Load both libraries, kernels and runtime. Raises CompilerMissing if the system refuses to load them."""
        try:
            return ctypes.CDLL(str(self.kernels)), ctypes.CDLL(str(self.runtime))
        except OSError as error:
            raise CompilerMissing(
                "a compiled Metal kernel cannot be loaded: set XDG_CACHE_HOME to a folder of this machine from which "
                f"programs can be run ({error})"
            ) from None


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: a command that takes the options of g++."""

    command: tuple[str, ...]
    version: str

    @classmethod
    def find(cls) -> Compiler:
        """Return the first of $CXX, g++ and clang++ that runs. Raises CompilerMissing if none of them does."""
        tried = []
        for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
            try:
                command = tuple(shlex.split(name))
                return cls(command, _run([*command, "--version"]).splitlines()[0])
            except FileNotFoundError:
                tried.append(f"'{name}' is not there")
            except subprocess.CalledProcessError as error:
                tried.append(f"'{name} --version' fails: {error.stderr.strip() or error}")
            except IndexError:
                tried.append(f"'{name}' tells no version")
            except (OSError, ValueError) as error:  # `name` cannot be run, or is no valid command line
                tried.append(f"'{name}': {error}")
        raise CompilerMissing(
            f"Metal kernels are emulated by compiling them as C++, and no compiler was found: {_INSTALL} "
            f"({'; '.join(tried)})"
        )

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version

    def can_fill_variables(self) -> bool:
        """Return whether the compiler has an option to fill uninitialised variables with garbage; older ones do not."""
        try:
            _run([*self.command, *_LANGUAGE, _FILL_VARIABLES, "-E", "-"])
        except subprocess.CalledProcessError:
            return False
        return True

    def preprocess(self, source: str, include: tuple[str, ...]) -> str:
        """Return the source with macros and headers expanded. Raises SyntaxError if the preprocessor finds an error."""
        folders = [f"-I{folder}" for folder in (_make_empty_headers(), *include)]
        marked = f'#line 1 "program_source"\n{source}'
        return self._compile([*_LANGUAGE, "-E", "-nostdinc", *DEFINES, *folders, "-"], marked)

    def check(self, *, checked: bool) -> None:
        """Check the compiler: compile and load the runtime. Raises CompilerMissing if that fails."""
        try:
            self.build_library("", checked=checked, ucontext=False).load()
        except SyntaxError as error:
            raise self._make_missing_error(error) from None

    def build_library(self, text: str, *, checked: bool, ucontext: bool) -> BuiltLibraries:
        """Build the shared libraries of kernels and of the runtime, or find them in the cache.

        Raises SyntaxError if the compiler finds errors in the kernels, and CompilerMissing if the compiler cannot be
        used.
        """
        options = self._kernel_options(checked)
        runtime = [*_CODE, "-std=c++17", "-O2", *(["-DEMULATOR_UCONTEXT"] if ucontext else [])]
        cached = cache_folder() / f"{_make_cache_key(self, text, options, runtime, *_read_own_files())}.so"
        linked_with = self._build_runtime(runtime)
        if _is_intact(cached):
            return BuiltLibraries(cached, linked_with)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=cache_folder()) as folder:
            kernels, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
            self._compile([*options, "-c", "-", "-o", str(kernels)], text, folder)
            self._compile(["-shared", "-o", str(linked), str(kernels), str(linked_with), "-lm"])
            _move_to_cache(linked, cached)
        return BuiltLibraries(cached, linked_with)

    def _kernel_options(self, checked: bool) -> list[str]:
        options = [*_LANGUAGE, *_CODE, *_KERNELS, *DEFINES, f"-I{HERE / 'include'}", "-include", "metal_stdlib"]
        options += _CHECKED if checked else ["-O2"]
        if checked and self.can_fill_variables():
            options.append(_FILL_VARIABLES)
        if self.is_clang:
            options += ["-Xclang", "-cl-single-precision-constant", "-Xclang", "-ffloat16-excess-precision=none"]
        else:
            options += ["-fsingle-precision-constant", "-fno-gnu-unique", "-fexcess-precision=16"]
        if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            options.append("-march=x86-64-v3")
        return options

    def _build_runtime(self, options: list[str]) -> Path:
        """Build the library of the runtime, once for all kernels.

        Raises CompilerMissing if the compiler cannot build it.
        """
        cached = cache_folder() / f"runtime-{_make_cache_key(self, '', options, *_read_own_files())}.so"
        if not _is_intact(cached):
            with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=cache_folder()) as folder:
                compiled, text = Path(folder, "runtime.so"), str(HERE / "runtime/runtime.cpp")
                try:
                    self._compile([*options, "-shared", text, "-o", str(compiled), "-pthread", "-ldl"])
                except SyntaxError as error:
                    raise self._make_missing_error(error) from None
                _move_to_cache(compiled, cached)
        return cached

    def _make_missing_error(self, error: SyntaxError) -> CompilerMissing:
        return CompilerMissing(
            f"'{shlex.join(self.command)}' cannot compile what Metal kernels are emulated with: {_INSTALL} ({error})"
        )

    def _compile(self, options: list[str], text: str = "", folder: str | None = None) -> str:
        try:
            return _run([*self.command, *options], text, folder)
        except subprocess.CalledProcessError as error:
            faults = [f"{where}: {what}" for where, what in _ERROR.findall(error.stderr)]
            raise SyntaxError("\n".join(faults[:8]) or error.stderr) from None


def find_source_line(library: Path, after: int) -> str:
    """Return the source's file:line of the call with return address `after` in the library; "" if it is not known.

    Needs the program addr2line (binutils).
    """
    if not shutil.which("addr2line"):
        return ""
    found = _run(["addr2line", "-i", "-e", str(library), hex(after - 1)]).splitlines()
    # If calls are inlined, the innermost line that is not in one of our headers is the line of the Metal source.
    ours = f"{HERE / 'include'}{os.sep}"
    places = [place.split(" ")[0] for place in found if not place.startswith((ours, "??"))]
    return _BUILD_FOLDER.sub("", places[0]) if places else ""


def cache_folder() -> Path:
    """Return the folder of all compiled libraries; it may be deleted at any time.

    It is in the user's cache folder or, if that cannot be written, a temporary folder that is deleted when the process
    ends. Raises CompilerMissing if there is no place for that either.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser().absolute() / "kvmux" / "metal-emulator"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError is raised if the user has no home directory
        return Path(_make_temporary_folder(home).name)


@cache
def _make_temporary_folder(home: str) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder to use instead of the folder `home`; it is deleted when the process ends."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvmux-metal-emulator-")
    except OSError as error:
        raise CompilerMissing(f"no folder can keep compiled Metal kernels: set TMPDIR to one ({error})") from None
    _LOG.warning(
        "nothing can be written to %s, so Metal kernels are compiled anew at every start: "
        "set XDG_CACHE_HOME to a folder that can be written to",
        home,
    )
    return folder


def _make_empty_headers() -> str:
    folder = cache_folder() / "headers"
    folder.mkdir(exist_ok=True)
    for name in HEADERS:
        if not (folder / name).exists():
            (folder / name).touch()
    return str(folder)


def _move_to_cache(built: Path, cached: Path) -> None:
    """Move a library to the cache with its digest, as loading a truncated library would end the process."""
    digest = built.with_suffix(".sha256")
    digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
    os.replace(built, cached)
    os.replace(digest, cached.with_suffix(".sha256"))


def _is_intact(cached: Path) -> bool:
    digest = cached.with_suffix(".sha256")
    try:
        return digest.read_bytes() == hashlib.sha256(cached.read_bytes()).hexdigest().encode()
    except OSError:
        return False


def _read_own_files() -> list[str]:
    return [
        path.read_text()
        for kind in ("include", "runtime")
        for path in sorted((HERE / kind).rglob("*"))
        if path.is_file()
    ]


def _make_cache_key(compiler: Compiler, text: str, *others: object) -> str:
    parts = (cache_folder(), platform.machine(), compiler.command, compiler.version, text, *others)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _run(command: list[str], text: str = "", folder: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout

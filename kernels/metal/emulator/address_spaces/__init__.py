"""Checks Metal source as nearly as an ordinary clang can to what Apple's compiler would check, without running it.

Apple's compiler is a clang whose types have address spaces. So a source is compiled twice without making code: as
the C++ that the emulator runs, and as C++ with clang's address_space attribute behind `device`, `constant` and
`threadgroup` (rewriting.py, include/). Before both, the emulator's rules and those of declared.py are checked.
Knows no kernel of ours.

What comes of it is a hint: Apple's compiler may refuse more.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from os import PathLike, fspath, sep
from pathlib import Path

from kernels.metal.emulator import rules
from kernels.metal.emulator.address_spaces import declared
from kernels.metal.emulator.address_spaces.diagnostics import Fault, parse_faults
from kernels.metal.emulator.address_spaces.rewriting import rewrite
from kernels.metal.emulator.build import DEFINES, HERE, Compiler, CompilerMissing
from kernels.metal.emulator.tokens import Source
from kernels.metal.emulator.translation import Translator

INCLUDE, EMULATOR_INCLUDE = Path(__file__).parent / "include", HERE / "include"
LANGUAGE = ("-x", "c++", "-std=gnu++14", "-fsyntax-only", "-nostdinc", "-ferror-limit=0", "-fno-caret-diagnostics")
SINGLE = ("-Xclang", "-cl-single-precision-constant")  # 1.0 is a float in Metal
ERRORS = (  # what clang would only warn of, or accept as an extension
    "c++11-narrowing",
    "c++17-extensions",
    "c++20-extensions",
    "infinite-recursion",
    "return-type",
    "uninitialized",
    "vla-cxx-extension",
)


class Clang:
    """The clang of PyPI's ziglang, or clang++, of which older versions lack some types."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._compiler = Compiler(command, "clang")

    @classmethod
    def find(cls) -> Clang:
        """Return the clang of ziglang, or clang++. Raises CompilerMissing."""
        if importlib.util.find_spec("ziglang") is not None:
            return cls((sys.executable, "-m", "ziglang", "clang"))
        if shutil.which("clang++"):
            return cls(("clang++",))
        raise CompilerMissing(
            "address spaces are checked by clang: pip install ziglang, which has one, or install clang++"
        )

    def check(self, source: str, include: Iterable[str | PathLike[str]] = ()) -> None:
        """Check a source. Raises SyntaxError with a line, file and line number for what Apple's compiler would refuse.

        `include`: folders in which #include finds headers.
        """
        rules.check_text(source)
        expanded = Source(self._compiler.preprocess(source, tuple(fspath(folder) for folder in include)))
        rules.check(expanded)
        found = [*declared.check(expanded), *self._find_faults(rewrite(expanded), INCLUDE)]
        lines = {where for where, _ in found}
        emulated = self._find_faults(Translator(expanded).translate().text, EMULATOR_INCLUDE)
        found += [fault for fault in emulated if fault[0] not in lines]
        if found:
            raise SyntaxError("\n".join(dict.fromkeys(f"{where}: {what}" for where, what in found)))

    def _find_faults(self, text: str, headers: Path) -> list[Fault]:
        """Return the faults that clang finds in C++ that is compiled with these headers."""
        options = [*LANGUAGE, *SINGLE, *(f"-Werror={name}" for name in ERRORS), *DEFINES]
        command = [*self._command, *options, f"-I{headers}", f"-I{EMULATOR_INCLUDE}", "-include", "metal_stdlib", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        found = parse_faults(done.stderr, f"{headers}{sep}")
        assert "error: " in done.stderr or not done.returncode, done.stderr
        return found

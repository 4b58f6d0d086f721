"""Checks Metal source without running it, as nearly as an ordinary clang can, for what Apple's compiler would refuse.

Apple's compiler is a clang whose types have address spaces. So a source is compiled twice, only to find errors: as the
C++ that the emulator runs, and as C++ with clang's address_space attribute behind `device`, `constant` and
`threadgroup` (rewriting.py, include/). Before both, the emulator's rules and those of declared.py are checked. Knows no
kernel of this project.

A source without faults is no proof: Apple's compiler may refuse more.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from os import PathLike, fspath, sep
from pathlib import Path

from metal_emulator import rules
from metal_emulator.address_spaces import declared
from metal_emulator.address_spaces.diagnostics import Fault, parse_faults
from metal_emulator.address_spaces.rewriting import rewrite
from metal_emulator.build import DEFINES, HERE, Compiler, CompilerMissing
from metal_emulator.tokens import Source
from metal_emulator.translation import Translator

INCLUDE, EMULATOR_INCLUDE = Path(__file__).parent / "include", HERE / "include"
LANGUAGE = ("-x", "c++", "-std=gnu++14", "-fsyntax-only", "-nostdinc", "-ferror-limit=0", "-fno-caret-diagnostics")
SINGLE = ("-Xclang", "-cl-single-precision-constant")  # options of clang: a literal such as 1.0 is a float, as in Metal
ERRORS = (  # clang's warnings that are errors here: it would only warn, or accept an extension
    "c++11-narrowing",
    "c++17-extensions",
    "c++20-extensions",
    "infinite-recursion",
    "return-type",
    "uninitialized",
    "vla-cxx-extension",
)


class Clang:
    """A clang: that of PyPI's package ziglang, or clang++, of which older versions lack some types."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._compiler = Compiler(command, "clang")

    @classmethod
    def find(cls) -> Clang:
        """Return the clang of the package ziglang, or else clang++. Raises CompilerMissing if there is neither."""
        if importlib.util.find_spec("ziglang") is not None:
            return cls((sys.executable, "-m", "ziglang", "clang"))
        if shutil.which("clang++"):
            return cls(("clang++",))
        raise CompilerMissing(
            "checking address spaces needs clang: pip install ziglang, which contains it, or install clang++"
        )

    def check(self, source: str, include: Iterable[str | PathLike[str]] = ()) -> None:
        """Check a source. Raises SyntaxError with a line "file:line: fault" for all that Apple's compiler would refuse.

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
        """Return the faults that clang finds in C++ source `text`, compiled with the headers in a folder."""
        options = [*LANGUAGE, *SINGLE, *(f"-Werror={name}" for name in ERRORS), *DEFINES]
        command = [*self._command, *options, f"-I{headers}", f"-I{EMULATOR_INCLUDE}", "-include", "metal_stdlib", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        found = parse_faults(done.stderr, f"{headers}{sep}")
        assert "error: " in done.stderr or not done.returncode, done.stderr
        return found

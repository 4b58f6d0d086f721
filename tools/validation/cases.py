"""Computes GGUF files with llama.cpp and with kvmux, and compares the results: `make validate`."""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table
from tools.server_process import RunError
from tools.validation.gguf_files import write_float32
from tools.validation.kvmux import KvmuxServer, list_strategies, serve
from tools.validation.llama_cpp import LlamaCppServer, get_llama_cpp_version, serve_llama_cpp
from tools.validation.predictions import Bounds, Results, compare
from tools.validation.subjects import SIZES, SUBJECTS, TRICKY_TEXTS, Sizes, Subject, is_there, make_subject

# How llama.cpp computes: name of the row, type of keys and values. Everything is compared with the first row.
FLOAT32, AS_STORED = "float32", "as stored"
LLAMA_CPP_ROWS = {FLOAT32: "f32", AS_STORED: "f32", "float32, cache q8_0": "q8_0"}
DTYPES = {"float32": "f32", "bfloat16": "auto"}  # of kvmux: --dtype and --weights; auto: as they are served by default
PROMPT_TOKENS = 24  # of a greedy text
# Of kvmux by --dtype, and of llama.cpp where it reads the file as it is stored and rounds activations to 8 bits.
BOUNDS = {
    "float32": Bounds(0.001, 0.001, 0.01),
    "bfloat16": Bounds(0.05, 0.1, 1.0),
    AS_STORED: Bounds(0.1, 0.2, 2.0),
}

Variant = Callable[["PreparedFile"], Iterable[Reading]]  # computes a file in one way


class Tokenizing(Protocol):
    """A server that tokenizes texts."""

    def tokenize(self, text: str, *, add_special: bool) -> list[int]: ...


def tokenize(server: Tokenizing, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text, with the special tokens that begin one and without them."""
    return server.tokenize(text, add_special=True), server.tokenize(text, add_special=False)


# ---------------------------------------------------------------- cases
def add_arguments(parser: ArgumentParser) -> None:
    add, threads = parser.add_argument, os.cpu_count() or 1
    add("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="models (default: all that are there)")
    names = list_strategies()
    add("--strategies", nargs="+", choices=names, default=names, help="strategies (default: all)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="number formats of kvmux (default: all)")
    add("--threads", type=int, default=threads, help="threads of each program (default: all processors)")


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each model that is there. Raises RunError if there is none."""
    options = context.options
    if options.threads < 1:
        raise ValueError("--threads should be at least 1")
    there = [name for name in options.only if is_there(name)]
    if not there:
        raise RunError(f"none of these models is there: make models MODELS={options.only[0]}")
    missing = [name for name in options.only if name not in there]
    context.notes.append(f"llama.cpp is that of {get_llama_cpp_version()}")
    context.notes.extend(f"{name} was left out: `make models MODELS={name}` fetches it" for name in missing)
    yield from (make_case(name, options) for name in there)


def make_case(name: str, options: Namespace, sizes: Sizes | None = None) -> Case:
    """Return the case of a model of SUBJECTS, whose variants are the ways of computing it."""
    sizes = sizes or SIZES[name]
    variants: dict[str, Variant] = {f"llama.cpp, {row}": partial(_measure_llama_cpp, row) for row in LLAMA_CPP_ROWS}
    for dtype in options.dtypes:
        variants[f"kvmux, {dtype}, tokens of texts"] = partial(_compare_tokens, dtype)
        variants |= {f"kvmux, {dtype}, {each}": partial(_measure_kvmux, dtype, each) for each in options.strategies}
    note = (
        f"{sizes.num_windows * sizes.predicted:,} tokens predicted, in {sizes.num_windows} windows of {sizes.window:,} "
        f"tokens; {sizes.texts} greedy texts"
    )
    table = Table(name, variants_are_rows=True, note=note)
    set_up = partial(prepare, name, sizes, options.threads)
    return Case(
        name, table, lambda file, variant: variants[variant](file), list(variants), set_up, max_turns=1, is_timed=False
    )


@contextmanager
def prepare(name: str, sizes: Sizes, threads: int) -> Iterator[PreparedFile]:
    """Yield a model as float32, with its texts as tokens. Raises RunError and OSError."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        subject = make_subject(name, Path(folder), sizes)
        write_float32(subject.file, as_float32 := Path(folder) / "float32.gguf")
        file = PreparedFile(subject, threads, Path(folder), as_float32, servers)
        file.prepare_texts()
        yield file


def _measure_llama_cpp(row: str, file: PreparedFile) -> Iterator[Reading]:
    results = file.run_llama_cpp(row)
    file.base = file.base or results
    yield from compare(results, file.base, BOUNDS.get(row, BOUNDS[AS_STORED]), exact=row == AS_STORED)


def _measure_kvmux(dtype: str, strategy: str, file: PreparedFile) -> Iterator[Reading]:
    assert file.base is not None, "llama.cpp was the first"
    server = file.start_kvmux(dtype)
    results = file.run_kvmux(server, strategy)
    yield from compare(results, file.base, BOUNDS[dtype], exact=server.strategies[strategy])


def _compare_tokens(dtype: str, file: PreparedFile) -> Iterator[Reading]:
    """Yield how many texts have the same tokens under kvmux."""
    server, total = file.start_kvmux(dtype), len(file.texts)
    wrong = [text for text, ids in zip(file.texts, file.tokens, strict=True) if tokenize(server, text) != ids]
    row = Row("texts with the same tokens", f"of {total}", lower_is_better=False, goal=total)
    yield Reading(row, total - len(wrong), reason="; ".join(f"the tokens of {text[:40]!r} differ" for text in wrong))


# ---------------------------------------------------------------- one file
@dataclass
class PreparedFile:
    """One GGUF file, the texts that both programs compute, and a server of kvmux that goes on running."""

    subject: Subject
    threads: int
    scratch: Path
    as_float32: Path
    servers: ExitStack
    base: Results | None = None  # of llama.cpp's first row
    tokens: list[tuple[list[int], list[int]]] = field(default_factory=list)  # by llama.cpp, of each text to tokenize
    windows: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)  # of greedy texts
    _kvmux: tuple[str, KvmuxServer] | None = None

    @property
    def texts(self) -> Sequence[str]:
        return [self.subject.text, *TRICKY_TEXTS]

    @property
    def _longest(self) -> int:
        """The number of tokens of the longest text, and of one that is generated after it."""
        return 1 + max(self.subject.sizes.window, 1 + PROMPT_TOKENS + self.subject.sizes.max_tokens)

    def prepare_texts(self) -> None:
        """Tokenize all texts by llama.cpp, and cut the subject's into windows and prompts."""
        with self._serve_llama_cpp(self.as_float32, "f32") as server:
            self.tokens = [tokenize(server, text) for text in self.texts]
        (tokens, plain), sizes = self.tokens[0], self.subject.sizes
        begin = tokens[: len(tokens) - len(plain)]  # each window is a text of its own
        for i in range(sizes.num_windows):
            self.windows.append([*begin, *tokens[i * sizes.window + len(begin) : (i + 1) * sizes.window]])
        step = (len(plain) - PROMPT_TOKENS) // sizes.texts
        self.prompts = [[*begin, *plain[i * step : i * step + PROMPT_TOKENS]] for i in range(sizes.texts)]

    def _serve_llama_cpp(self, file: Path, cache_type: str) -> AbstractContextManager[LlamaCppServer]:
        return serve_llama_cpp(file, cache_type, self.threads, self._longest)

    def run_llama_cpp(self, row: str) -> Results:
        """Compute everything in the way of a row of LLAMA_CPP_ROWS."""
        file, sizes = self.subject.file if row == AS_STORED else self.as_float32, self.subject.sizes
        with self._serve_llama_cpp(file, LLAMA_CPP_ROWS[row]) as server:
            greedy = server.continue_greedily(self.prompts, sizes.max_tokens, self.subject.eos_ids)
            return Results(server.predict(self.windows, sizes.predicted), greedy)

    def start_kvmux(self, dtype: str) -> KvmuxServer:
        """Return a server of kvmux; the one before, of another number format, is ended. Raises RunError."""
        if self._kvmux is None or self._kvmux[0] != dtype:
            self.servers.close()
            window, longest = self.subject.sizes.window, self._longest
            running = serve(self.subject.file, dtype, DTYPES[dtype], self.threads, window, longest, self.scratch)
            self._kvmux = dtype, self.servers.enter_context(running)
        return self._kvmux[1]

    def run_kvmux(self, server: KvmuxServer, strategy: str) -> Results:
        sizes = self.subject.sizes
        predictions = server.predict(strategy, self.windows, sizes.predicted)
        return Results(
            predictions, server.continue_greedily(strategy, self.prompts, sizes.max_tokens, self.subject.eos_ids)
        )


GROUP = Group(
    """\
Computes the embedded model and the real models that `make models` has fetched with kvmux and with llama.cpp, which the
package xllamacpp has as a library. Compared are log-probabilities, greedy texts and tokens, under each cache strategy.
The exit status is 1 if a strategy that drops and rounds nothing differs by more than its number format explains
(docs/laboratory/validation.md), or if the tokenizers differ.""",
    list_cases,
    add_arguments,
    Effort(1),
    "make validate",
    "validation.md",
    parts=("only", "strategies", "dtypes"),
    goals_are_bounds=True,
)

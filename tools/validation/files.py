"""Computes one GGUF file with llama.cpp and with kvmux, and compares the results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from tools.validation.gguf_files import write_float32
from tools.validation.kvmux import KvmuxServer, serve
from tools.validation.llama_cpp import LlamaCppServer, serve_llama_cpp
from tools.validation.native import NativeLlamaCpp
from tools.validation.predictions import Agreement, GreedyAgreement, GreedyText, Predictions
from tools.validation.report import AS_STORED, LLAMA_CPP, ValidatedFile, ValidatedRow
from tools.validation.subjects import Subject
from tools.validation.texts import TRICKY_TEXTS

# How llama.cpp computes: name of the row, type of keys and values. Everything is compared with the first row.
FLOAT32 = "float32"
LLAMA_CPP_ROWS = {FLOAT32: "f32", AS_STORED: "f32", "float32, cache q8_0": "q8_0"}
DTYPES = {"float32": "f32", "bfloat16": "auto"}  # of kvmux: --dtype and --weights; auto: as they are served by default
PROMPT_TOKENS = 24  # of a greedy text


class Tokenizing(Protocol):
    """A server that tokenizes texts."""

    def tokenize(self, text: str, *, add_special: bool) -> list[int]: ...


@dataclass(frozen=True)
class ValidationOptions:
    """What is computed, and how."""

    threads: int  # of each program
    dtypes: Collection[str] = tuple(DTYPES)
    strategies: Collection[str] = ()  # names of instances; empty: all
    llama_cpp_rows: Collection[str] = tuple(LLAMA_CPP_ROWS)  # always with the first
    native: Path | None = None  # folder with a llama.cpp built from source, to predict with llama-perplexity instead


class Texts(NamedTuple):
    """What both programs compute, as tokens."""

    windows: Sequence[Sequence[int]]
    predicted: int  # tokens at the end of each window
    prompts: Sequence[Sequence[int]]  # of greedy texts


class Results(NamedTuple):
    """What one program computed in one way."""

    predictions: Predictions
    greedy: Sequence[GreedyText]


@dataclass(frozen=True)
class FileValidation:
    """The validation of one GGUF file."""

    subject: Subject
    options: ValidationOptions
    show_status: Callable[[str], None]

    def run(self) -> ValidatedFile:
        """Compute and compare everything. Raises RunError and OSError."""
        rows: list[ValidatedRow] = []
        wrong = dict[str, None]()  # texts whose tokens differ, in their order
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            self._show("writing its weights as float32")
            write_float32(self.subject.file, as_float32 := scratch / "float32.gguf")
            with self._serve_llama_cpp(as_float32, "f32") as server:
                tokens = [tokenize(server, text) for text in self._texts_to_tokenize]
            texts = self._cut_texts(*tokens[0])
            results = {
                name: self._run_llama_cpp(name, as_float32, texts, scratch) for name in self.options.llama_cpp_rows
            }
            base, *_ = results.values()
            rows += [compare(LLAMA_CPP, name, "-", name == AS_STORED, each, base) for name, each in results.items()]
            for dtype in self.options.dtypes:
                self._show(f"starting kvmux, {dtype}")
                with self._serve_kvmux(dtype, scratch) as kvmux:
                    expected = zip(self._texts_to_tokenize, tokens, strict=True)
                    wrong |= {text: None for text, ids in expected if tokenize(kvmux, text) != ids}
                    rows += self._run_kvmux(kvmux, dtype, texts, base)
        sizes, file = self.subject.sizes, self.subject.file.name
        return ValidatedFile(self.subject.name, file, sizes.num_windows, sizes.window, len(tokens), [*wrong], rows)

    def _show(self, status: str) -> None:
        self.show_status(f"{self.subject.name}: {status}")

    @property
    def _texts_to_tokenize(self) -> Sequence[str]:
        return [self.subject.text, *TRICKY_TEXTS]

    def _cut_texts(self, tokens: Sequence[int], plain: Sequence[int]) -> Texts:
        """Return the windows and prompts of the subject's text; `plain` are its tokens without those that begin it."""
        sizes = self.subject.sizes
        begin = list(tokens[: len(tokens) - len(plain)])  # each window is a text of its own
        step = sizes.window
        windows = [[*begin, *tokens[i * step + len(begin) : (i + 1) * step]] for i in range(sizes.num_windows)]
        step = (len(plain) - PROMPT_TOKENS) // sizes.texts
        prompts = [[*begin, *plain[i * step : i * step + PROMPT_TOKENS]] for i in range(sizes.texts)]
        predicted = sizes.predicted if self.options.native is None else sizes.window - 1 - sizes.window // 2
        return Texts(windows, predicted, prompts)

    # ---------------------------------------------------------------- llama.cpp
    def _serve_llama_cpp(self, file: Path, cache_type: str) -> AbstractContextManager[LlamaCppServer]:
        return serve_llama_cpp(file, cache_type, self.options.threads, self._longest)

    @property
    def _longest(self) -> int:
        """The number of tokens of the longest text, and of one that is generated after it."""
        return 1 + max(self.subject.sizes.window, 1 + PROMPT_TOKENS + self.subject.sizes.max_tokens)

    def _run_llama_cpp(self, name: str, as_float32: Path, texts: Texts, scratch: Path) -> Results:
        """Compute everything in the way of a row."""
        self._show(f"llama.cpp, {name}")
        file, cache_type = self.subject.file if name == AS_STORED else as_float32, LLAMA_CPP_ROWS[name]
        with self._serve_llama_cpp(file, cache_type) as server:
            sizes = self.subject.sizes
            greedy = server.continue_greedily(texts.prompts, sizes.max_tokens, self.subject.eos_ids)
            if self.options.native is None:
                return Results(server.predict(texts.windows, texts.predicted), greedy)
        (text := scratch / "text").write_text(self.subject.text)
        program = NativeLlamaCpp(self.options.native, file, self.options.threads, cache_type)
        return Results(program.predict(text, texts.windows, scratch), greedy)

    # ---------------------------------------------------------------- kvmux
    def _serve_kvmux(self, dtype: str, scratch: Path) -> AbstractContextManager[KvmuxServer]:
        file, window = self.subject.file, self.subject.sizes.window
        return serve(file, dtype, DTYPES[dtype], self.options.threads, window, self._longest, scratch)

    def _run_kvmux(self, server: KvmuxServer, dtype: str, texts: Texts, base: Results) -> Iterator[ValidatedRow]:
        """Yield the row of each strategy."""
        for name, exact in server.strategies.items():
            if self.options.strategies and name not in self.options.strategies:
                continue
            self._show(f"kvmux, {dtype}, {name}")
            predictions = server.predict(name, texts.windows, texts.predicted)
            sizes = self.subject.sizes
            greedy = server.continue_greedily(name, texts.prompts, sizes.max_tokens, self.subject.eos_ids)
            yield compare("kvmux", dtype, name, exact, Results(predictions, greedy), base)


def tokenize(server: Tokenizing, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text, with the special tokens that begin one and without them."""
    return server.tokenize(text, add_special=True), server.tokenize(text, add_special=False)


def compare(program: str, dtype: str, strategy: str, exact: bool, own: Results, base: Results) -> ValidatedRow:
    """Return the row of a table that compares results with those of llama.cpp's first row."""
    agreement = Agreement.between(own.predictions, base.predictions)
    return ValidatedRow(program, dtype, strategy, exact, agreement, GreedyAgreement.between(own.greedy, base.greedy))

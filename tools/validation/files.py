"""Computes one GGUF file with llama.cpp and with kvmux, and compares the results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.validation.kvmux import KvmuxServer, serve, tokenize
from tools.validation.llama_cpp import LlamaCpp, LlamaCppText
from tools.validation.predictions import Agreement, GreedyAgreement, GreedyText, count_equal
from tools.validation.report import ValidatedFile, ValidatedRow
from tools.validation.subjects import Subject

CACHE_TYPES = ("f32", "f16", "q8_0")  # of llama.cpp's keys and values; everything is compared with the first
DTYPES = ("float32", "bfloat16")  # of kvmux
PROMPT_TOKENS = 32  # of a greedy text


@dataclass(frozen=True)
class ValidationOptions:
    """The greedy texts to compare, and the threads of each program."""

    texts: int
    max_tokens: int
    threads: int


@dataclass(frozen=True)
class LlamaCppResults:
    """What llama.cpp computed with one number format of keys and values."""

    cache_type: str
    text: LlamaCppText
    greedy: Sequence[GreedyText]


@dataclass(frozen=True)
class FileValidation:
    """The validation of one GGUF file."""

    subject: Subject
    file: Path
    matrix_type: str
    llama_cpp: Path  # folder of llama.cpp
    options: ValidationOptions
    show_status: Callable[[str], None]

    def run(self) -> ValidatedFile:
        """Compute and compare everything. Raises RunError and OSError."""
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            results = list(self._run_llama_cpp(scratch))
            base = results[0]
            rows = [self._compare_llama_cpp(each, base) for each in results]
            for dtype in DTYPES:
                self._show(f"starting kvmux, {dtype}")
                with serve(self.file, dtype, self.options.threads, self.subject.window, scratch) as server:
                    rows += self._compare_kvmux(server, dtype, base)
        return ValidatedFile(
            self.subject.directory.name,
            self.matrix_type,
            self.subject.num_windows,
            self.subject.window,
            self.options.texts,
            count_equal(tokenize(self.file, self.subject.text), self._join_windows(base)),
            len(self._join_windows(base)),
            rows,
        )

    def _show(self, status: str) -> None:
        self.show_status(f"{self.subject.directory.name}, {self.matrix_type}: {status}")

    @staticmethod
    def _join_windows(results: LlamaCppResults) -> list[int]:
        return [token for window in results.text.windows for token in window]

    # ---------------------------------------------------------------- llama.cpp
    def _run_llama_cpp(self, scratch: Path) -> Iterator[LlamaCppResults]:
        text = scratch / "text"
        text.write_text(self.subject.text)
        prompts: list[Sequence[int]] = []
        for cache_type in CACHE_TYPES:
            self._show(f"llama.cpp, {cache_type}")
            program = LlamaCpp(self.llama_cpp, self.file, self.options.threads, cache_type)
            predicted = program.predict(text, self.subject.window, self.subject.num_windows, scratch)
            prompts = prompts or self.choose_prompts(predicted)
            texts = program.continue_greedily(prompts, self.options.max_tokens, self.subject.eos_ids)
            yield LlamaCppResults(cache_type, predicted, texts)

    def choose_prompts(self, text: LlamaCppText) -> list[Sequence[int]]:
        """Return the prompts of the greedy texts: parts of the text, at equal distances."""
        tokens = [token for window in text.windows for token in window]
        step = (len(tokens) - PROMPT_TOKENS) // self.options.texts
        return [tokens[i * step : i * step + PROMPT_TOKENS] for i in range(self.options.texts)]

    def _compare_llama_cpp(self, own: LlamaCppResults, base: LlamaCppResults) -> ValidatedRow:
        agreement = Agreement.between(own.text.predictions, base.text.predictions)
        greedy = None if own is base else GreedyAgreement.between(own.greedy, base.greedy)
        exact = own.cache_type == "f32"
        return ValidatedRow("llama.cpp", own.cache_type, "-", exact, agreement, greedy)

    # ---------------------------------------------------------------- kvmux
    def _compare_kvmux(self, server: KvmuxServer, dtype: str, base: LlamaCppResults) -> Iterator[ValidatedRow]:
        windows = [self._begin(window, base) for window in base.text.windows]
        prompts, eos_ids = self.choose_prompts(base.text), self.subject.eos_ids
        for name, exact in server.strategies.items():
            self._show(f"kvmux, {dtype}, {name}")
            agreement = Agreement.between(server.predict(name, windows), base.text.predictions)
            greedy = server.continue_greedily(name, prompts, self.options.max_tokens, eos_ids)
            yield ValidatedRow("kvmux", dtype, name, exact, agreement, GreedyAgreement.between(greedy, base.greedy))

    def _begin(self, window: Sequence[int], base: LlamaCppResults) -> list[int]:
        """Return a window as llama.cpp computes it: if the text begins with a special token, each window does."""
        first = base.text.windows[0][0]
        return [first, *window[1:]] if first == self.subject.bos_id else list(window)

"""Formats a validation as Markdown tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from tools.bench.table.report import read_processor_name
from tools.validation.predictions import Agreement, GreedyAgreement

EXACT_BOUND = 0.005  # greatest relative difference of perplexities if both programs compute exactly


@dataclass(frozen=True)
class ValidatedRow:
    """The agreement of one program, number format and strategy with llama.cpp, whose own row has none to compare."""

    program: str  # "llama.cpp" or "kvmux"
    dtype: str  # of activations and values: kvmux's --dtype, llama.cpp's -ctk
    strategy: str
    exact: bool
    agreement: Agreement
    greedy: GreedyAgreement | None


@dataclass(frozen=True)
class ValidatedFile:
    """All rows of one GGUF file; agreement is with llama.cpp's first row."""

    model: str
    matrix_type: str
    windows: int
    window: int
    prompts: int
    equal_tokens: int  # tokens of the text that both tokenizers make equal, from the beginning
    tokens: int
    rows: Sequence[ValidatedRow]

    @property
    def failures(self) -> list[str]:
        """Sentences on what is not as it should be."""
        found = [
            f"{row.program}, {row.dtype}, {row.strategy}: perplexity {row.agreement.perplexity_ratio - 1:+.2%}"
            for row in self.rows
            if row.exact and not abs(row.agreement.perplexity_ratio - 1) <= EXACT_BOUND  # nor if it is not a number
        ]
        if self.equal_tokens < self.tokens:
            found.append(f"the tokenizers differ after {self.equal_tokens:,} of {self.tokens:,} tokens")
        return [f"{self.model}, {self.matrix_type}: {each}" for each in found]


@dataclass(frozen=True)
class ValidationReport:
    """The results of `make validate`."""

    date: datetime
    kvmux_version: str
    llama_cpp_version: str
    files: Sequence[ValidatedFile]

    @property
    def failures(self) -> list[str]:
        return [each for file in self.files for each in file.failures]


def as_text(report: ValidationReport) -> str:
    """Return headings, tables and notes in GitHub's Markdown."""
    heading = (
        f"{report.date.date().isoformat()}: kvmux {report.kvmux_version} and {report.llama_cpp_version} on "
        f"{read_processor_name()}."
    )
    failed = [f"- not as expected: {each}" for each in report.failures]
    return "\n\n".join([heading, *map(format_file, report.files), *(["\n".join(failed)] if failed else [])])


def format_file(file: ValidatedFile) -> str:
    """Return the table of one GGUF file under a line that says what was computed."""
    positions = file.rows[0].agreement.positions
    lines = [
        f"**{file.model}, {file.matrix_type}**: {positions:,} positions in {file.windows} windows of {file.window:,} "
        f"tokens, {file.prompts} greedy texts. The tokenizers agree on {file.equal_tokens:,} of {file.tokens:,} "
        "tokens.",
        "",
        "| program | dtype | strategy | perplexity | to llama.cpp | log-probability: mean, largest difference "
        "| same likeliest token | greedy texts equal | greedy tokens equal | clear differences |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *map(_format_row, file.rows),
    ]
    return "\n".join(lines)


def _format_row(row: ValidatedRow) -> str:
    return "| " + " | ".join(_iter_cells(row)) + " |"


def _iter_cells(row: ValidatedRow) -> Iterator[str]:
    agreement, greedy = row.agreement, row.greedy
    yield row.program
    yield row.dtype
    yield f"`{row.strategy}`" if row.program == "kvmux" else row.strategy
    yield f"{agreement.perplexity:,.4g}" if agreement.perplexity >= 1e4 else f"{agreement.perplexity:,.4f}"
    yield f"{agreement.perplexity_ratio - 1:+.3%}"
    yield f"{_format_nats(agreement.mean_difference)}, {_format_nats(agreement.max_difference)}"
    yield f"{agreement.same_top:.2%}"
    if greedy is None:
        yield from ("-", "-", "-")
    else:
        yield f"{greedy.equal_texts} of {greedy.texts}"
        yield f"{greedy.equal_tokens / greedy.tokens:.1%}" if greedy.tokens else "-"
        yield "-" if greedy.num_clear_differences is None else str(greedy.num_clear_differences)


def _format_nats(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 or not value else f"{value:.0e}"


def as_json(report: ValidationReport) -> dict[str, Any]:
    return asdict(report) | {"date": report.date.isoformat(timespec="seconds"), "not_as_expected": report.failures}

"""Formats a validation as Markdown tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple

from tools.bench.report import read_processor_name
from tools.validation.predictions import Agreement, GreedyAgreement

LLAMA_CPP, AS_STORED = "llama.cpp", "as stored"


class Bounds(NamedTuple):
    """How far an exact strategy may be from llama.cpp with float32. docs/laboratory/validation.md gives the reasons."""

    perplexity: float  # relative
    mean_difference: float  # of log-probabilities, in nats
    near_tie: float  # nats between the two likeliest tokens, below which rounding may decide which of them comes first


# Of kvmux by --dtype, and of llama.cpp where it reads the file as it is stored and rounds activations to 8 bits.
BOUNDS = {
    "float32": Bounds(0.001, 0.001, 0.01),
    "bfloat16": Bounds(0.05, 0.1, 1.0),
    AS_STORED: Bounds(0.1, 0.2, 2.0),
}


@dataclass(frozen=True)
class ValidatedRow:
    """The agreement of one program, number format and strategy with llama.cpp's first row."""

    program: str  # LLAMA_CPP or "kvmux"
    dtype: str  # kvmux's --dtype; for llama.cpp, what its weights and its cache are
    strategy: str
    exact: bool  # whether bounds apply: it drops nothing, and rounds nothing but activations
    agreement: Agreement
    greedy: GreedyAgreement

    @property
    def bounds(self) -> Bounds:
        return BOUNDS.get(self.dtype, BOUNDS[AS_STORED])

    @property
    def num_clear_differences(self) -> int:
        """The number of greedy texts that part where the two likeliest tokens are clearly apart."""
        return self.greedy.count_clear(self.bounds.near_tie)

    @property
    def failures(self) -> list[str]:
        """List what is outside of the bounds; a row that is not exact has none."""
        found, bounds = self.agreement, self.bounds
        if not self.exact:
            return []
        said = []
        if not abs(found.perplexity_ratio - 1) <= bounds.perplexity:  # nor if it is not a number
            said.append(f"perplexity {found.perplexity_ratio - 1:+.2%}")
        if not found.mean_difference <= bounds.mean_difference:
            said.append(f"log-probabilities differ by {found.mean_difference:.4f} nats on average")
        if clear := self.num_clear_differences:
            said.append(f"{clear} of {self.greedy.texts} greedy texts differ clearly")
        return [f"{self.program}, {self.dtype}, {self.strategy}: {each}" for each in said]


@dataclass(frozen=True)
class ValidatedFile:
    """All rows of one GGUF file."""

    model: str
    file: str
    windows: int
    window: int  # tokens
    texts_tokenized: int
    differing_texts: Sequence[str]  # whose tokens differ
    rows: Sequence[ValidatedRow]

    @property
    def failures(self) -> list[str]:
        """Sentences on what is not as it should be."""
        tokens = [f"the tokens of {text[:40]!r} differ" for text in self.differing_texts]
        return [f"{self.model}: {each}" for each in [*(said for row in self.rows for said in row.failures), *tokens]]


@dataclass(frozen=True)
class ValidationReport:
    """The results of `make validate`."""

    date: datetime
    kvmux_version: str
    llama_cpp_version: str
    files: Sequence[ValidatedFile]
    missing: Sequence[str] = ()  # models that have not been fetched
    failed: Sequence[str] = ()  # sentences on models that could not be computed

    @property
    def failures(self) -> list[str]:
        return [*self.failed, *(each for file in self.files for each in file.failures)]


def as_text(report: ValidationReport) -> str:
    """Return headings, tables and notes in GitHub's Markdown."""
    heading = (
        f"{report.date.date().isoformat()}: kvmux {report.kvmux_version} and {report.llama_cpp_version} on "
        f"{read_processor_name()}."
    )
    failed = [f"- not as expected: {each}" for each in report.failures]
    left_out = [f"- {name} was left out: `make models MODELS={name}` fetches it" for name in report.missing]
    notes = [*failed, *left_out]
    return "\n\n".join([heading, *map(format_file, report.files), *(["\n".join(notes)] if notes else [])])


def format_file(file: ValidatedFile) -> str:
    """Return the table of one GGUF file under a line that says what was computed."""
    first = file.rows[0]
    equal = file.texts_tokenized - len(file.differing_texts)
    lines = [
        f"**{file.model}** ({file.file}): {first.agreement.positions:,} tokens predicted, in {file.windows} windows of "
        f"{file.window:,} tokens; {first.greedy.texts} greedy texts. The tokens of {equal} of {file.texts_tokenized} "
        "texts are equal.",
        "",
        "| program | computed in | strategy | perplexity | to llama.cpp | log-probability: mean, largest difference "
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
    yield row.strategy if row.program == LLAMA_CPP else f"`{row.strategy}`"
    yield f"{agreement.perplexity:,.4f}"
    yield f"{agreement.perplexity_ratio - 1:+.3%}"
    yield f"{_format_nats(agreement.mean_difference)}, {_format_nats(agreement.max_difference)}"
    yield f"{agreement.same_top:.2%}"
    yield f"{greedy.equal_texts} of {greedy.texts}"
    yield f"{greedy.equal_tokens / greedy.tokens:.1%}" if greedy.tokens else "-"
    yield str(row.num_clear_differences)


def _format_nats(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 or not value else f"{value:.0e}"


def as_json(report: ValidationReport) -> dict[str, Any]:
    return asdict(report) | {"date": report.date.isoformat(timespec="seconds"), "not_as_expected": report.failures}

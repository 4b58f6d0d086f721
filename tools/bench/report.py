"""Formats the samples of a run as Markdown tables and as JSON, and writes tables into the documents."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from server.profiling.background_load import BUSY_THRESHOLD
from server.profiling.machine import read_processor_name
from server.version import get_version
from tools.bench.runner import (
    ENOUGH_TURNS,
    Failure,
    Interval,
    Reading,
    Row,
    Sample,
    Table,
    compare_by_turns,
    estimate_median,
)

GOAL_COLUMNS = ("work", "measured", "goal", "met", "best peer", "others", "limit", "of the limit")
GOALS_ALIGNED = "|---|---:|---:|:---:|---:|---|---:|---:|"
DISTURBED_MARK, MISSING = "†", "-"
MAX_REASON = 300  # characters


@dataclass
class Report:
    """The results of a run."""

    date: datetime
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: Sequence[str] = ()  # printed below the tables

    def add(self, result: Sample | Failure) -> None:
        if isinstance(result, Sample):
            self.samples.append(result)
        else:
            self.failures.append(result)

    @property
    def missed(self) -> list[Sample]:
        """The samples whose values miss their goals."""
        valued = (each for each in self.samples if each.reading.value is not None)
        return [each for each in valued if each.reading.row.meets_goal(each.reading.value or 0) is False]

    @property
    def num_turns(self) -> int:
        return max((each.turn for each in self.samples), default=0)


# ---------------------------------------------------------------- text
def as_text(report: Report) -> str:
    """Return a heading, the tables and notes, in GitHub's Markdown."""
    tables = (_format_table(table, samples) for table, samples in _group_by_table(report.samples))
    return "\n\n".join([_format_heading(report), *tables, *_format_notes(report)])


def _format_heading(report: Report) -> str:
    limits = any(each.variant and each.reading.limit is not None for each in report.samples)
    brackets = " In brackets: the best possible value in the same minute, and the share of it." if limits else ""
    turns = f", medians of up to {report.num_turns} turns" if report.num_turns > 1 else ""
    machine = f"{read_processor_name()}, {psutil.cpu_count()} processors"
    return f"kvmux {get_version()} on {report.date.date().isoformat()}: {machine}{turns}.{brackets}"


def _group_by_table(samples: Iterable[Sample]) -> Iterator[tuple[Table, list[Sample]]]:
    groups: dict[Table, list[Sample]] = {}
    for each in samples:
        groups.setdefault(each.table, []).append(each)
    yield from groups.items()


def _format_table(table: Table, samples: Sequence[Sample]) -> str:
    variants = list(dict.fromkeys(each.variant for each in samples))
    head = [f"**{table.title}**" + (f": {table.note}" if table.note else "")]
    if variants == [""]:
        return "\n\n".join([*head, _format_goals(samples)])
    parts = [*head, _format_variants(table, samples, variants)]
    others = [name for name in variants if name != table.base]
    if table.base in variants and others:
        parts += _format_ratios(table, samples, others)
    return "\n\n".join(parts)


def _format_goals(samples: Sequence[Sample]) -> str:
    """Return a table in which each row has its goal, the figures of peers and the machine's limit."""
    lines = ["| " + " | ".join(GOAL_COLUMNS) + " |", GOALS_ALIGNED]
    for row, of_row in group_by_row(samples):
        best, *others = [f"{name} {format_number(float(value))}" for name, value in row.peers.items()] or [MISSING]
        value, limit, share = _summarize(of_row)
        cells = [
            _name(row),
            _format_cell(of_row, alone=True),
            MISSING if row.goal is None else format_number(float(row.goal)),
            {True: "yes", False: "no", None: MISSING}[None if value is None else row.meets_goal(value)],
            best,
            ", ".join(others) or MISSING,
            MISSING if limit is None else format_number(limit),
            MISSING if share is None else f"{share:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_variants(table: Table, samples: Sequence[Sample], variants: Sequence[str]) -> str:
    """Return a table of medians."""
    rows = list(group_by_row(samples))
    if table.variants_are_rows:
        lines = _start_table("", [_name(row) for row, _ in rows])
        for variant in variants:
            lines.append("| " + " | ".join([variant, *(_format_cell(each, variant) for _, each in rows)]) + " |")
        return "\n".join(lines)
    lines = _start_table("", variants)
    for row, of_row in rows:
        lines.append("| " + " | ".join([_name(row), *(_format_cell(of_row, each) for each in variants)]) + " |")
    return "\n".join(lines)


def _format_ratios(table: Table, samples: Sequence[Sample], others: Sequence[str]) -> Iterator[str]:
    """Yield an introduction and a table of how many times as fast the base is as each other variant, or the reverse."""
    base, reverse = str(table.base), table.compares_others
    pairs = [(other, base) if reverse else (base, other) for other in others]
    found = {
        row.what: [compare_by_turns(of_row, one, other) for one, other in pairs]
        for row, of_row in group_by_row(samples)
        if row.unit
    }
    counts = [each.coverage for ratios in found.values() for each in ratios if each is not None]
    if not counts:
        return
    whose = f"each is as {base}" if reverse else f"{base} is"
    text = f"How many times as fast (of sizes: as small) {whose}, the median of the ratios of the turns"
    if max(counts) > 0:
        text += ", and the interval that contains the true median with a probability of 95 % for any distribution"
    if max(counts) < 0.95:
        text += f"; of fewer than {ENOUGH_TURNS} turns it is the whole range, which contains it with the given one"
    yield text + "."
    lines = _start_table(f"times as fast as {base}" if reverse else "times as fast as", others)
    lines += ["| " + " | ".join([what, *map(format_ratio, ratios)]) + " |" for what, ratios in found.items()]
    yield "\n".join(lines)


def _start_table(corner: str, columns: Sequence[str]) -> list[str]:
    return ["| " + " | ".join([corner, *columns]) + " |", "|---|" + "---:|" * len(columns)]


def group_by_row(samples: Iterable[Sample]) -> Iterator[tuple[Row, list[Sample]]]:
    """Yield each row with its samples, in the order of the first ones."""
    groups: dict[str, list[Sample]] = {}
    for each in samples:
        groups.setdefault(each.reading.row.what, []).append(each)
    yield from ((of_row[0].reading.row, of_row) for of_row in groups.values())


def _name(row: Row) -> str:
    return f"{row.what}, {row.unit}" if row.unit else row.what


def _summarize(samples: Iterable[Sample]) -> tuple[float | None, float | None, float | None]:
    """Return the medians of the values, of the limits, and of the shares of the limit that were reached."""
    readings = [each.reading for each in samples if each.reading.value is not None]
    values = [each.value for each in readings if each.value is not None]
    limits = [each.limit for each in readings if each.limit is not None]
    shares = [share for each in readings if (share := compute_share(each)) is not None]
    value, limit, share = (median(numbers) if numbers else None for numbers in (values, limits, shares))
    return value, limit, share


def compute_share(reading: Reading) -> float | None:
    """Return the share of the limit that was reached; None without a value or a limit, and for ratios."""
    if not reading.value or reading.limit is None or reading.row.unit.startswith("of "):
        return None
    value, limit = reading.value, reading.limit
    return limit / value if reading.row.lower_is_better else value / limit


def _format_cell(samples: Sequence[Sample], variant: str = "", *, alone: bool = False) -> str:
    """Return the median of a variant and, unless `alone`, the limit and the share of it, or else the interval."""
    own = [each for each in samples if each.variant == variant]
    values = [each.reading.value for each in own if each.reading.value is not None]
    if not values:
        return MISSING
    found, (_, limit, share) = estimate_median(values), _summarize(own)
    mark = DISTURBED_MARK if any((each.reading.background_load or 0) > BUSY_THRESHOLD for each in own) else ""
    digits = samples[0].reading.row.digits
    text = format_number(found.median, digits) + mark
    if alone:
        return text
    if limit is not None and share is not None:
        return f"{text} ({format_number(limit)}, {share:.0%})"
    if found.low < found.high:
        return f"{text} ({format_number(found.low, digits)} to {format_number(found.high, digits)})"
    return text


def format_ratio(ratio: Interval | None) -> str:
    """Return the median and the interval, with the probability of one that has less than 95 %."""
    if ratio is None:
        return MISSING
    if not ratio.coverage:
        return f"{ratio.median:.2f}"
    probability = f"; {ratio.coverage:.0%}" if ratio.coverage < 0.95 else ""
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}{probability})"


def _format_notes(report: Report) -> list[str]:
    notes = [f"- {each}" for each in report.notes]
    notes += [f"- {each.case} was not measured: {_shorten(each.reason)}" for each in report.failures]
    notes += [_describe_missed(each) for each in report.missed if each.variant]
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in report.samples:
        if each.reading.reason:
            rows = reasons.setdefault((each.variant, _shorten(each.reading.reason)), [])
            rows += [each.reading.row.what] if each.reading.row.what not in rows else []
    notes += [f"- {variant}, {', '.join(rows)}: {reason}" for (variant, reason), rows in reasons.items()]
    busiest = max((each.reading.background_load or 0 for each in report.samples), default=0.0)
    if busiest > BUSY_THRESHOLD:
        notes.append(
            f"- {DISTURBED_MARK} disturbed: other processes used up to {busiest:.0%} of the machine in every attempt; "
            "without them these figures would be better."
        )
    return ["\n".join(notes)] if notes else []


def _describe_missed(sample: Sample) -> str:
    """Return a note on a variant that misses its goal; without variants the table has a column of goals."""
    row, value = sample.reading.row, sample.reading.value
    bound = "at most" if row.lower_is_better else "at least"
    return (
        f"- not as expected: {sample.table.title}, {sample.variant}: {_name(row)}: {value:.4g}, {bound} {row.goal:.4g}"
    )


def _shorten(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ..."


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, or with all digits before the point; a count as it is."""
    if isinstance(value, int):
        return f"{value:,}"
    if digits > 3:
        return f"{value:,.{digits}g}"
    if value and abs(value) < 1:
        return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


# ---------------------------------------------------------------- JSON
def as_json(report: Report) -> dict[str, Any]:
    """Return all samples and failures, with the machine that they are of."""
    machine = {"processor": read_processor_name(), "processors": psutil.cpu_count(), "system": platform.platform()}
    return {
        "date": report.date.isoformat(timespec="seconds"),
        "version": get_version(),
        "machine": machine,
        "notes": list(report.notes),
        "failures": [asdict(each) for each in report.failures],
        "rows": [_write_sample(each) for each in report.samples],
    }


def _write_sample(sample: Sample) -> dict[str, Any]:
    reading, row = sample.reading, sample.reading.row
    return {
        "table": asdict(sample.table),
        "variant": sample.variant,
        "turn": sample.turn,
        **asdict(row),
        "value": reading.value,
        "met": None if reading.value is None else row.meets_goal(reading.value),
        "limit": reading.limit,
        "of_the_limit": compute_share(reading),
        "used_by_others": reading.background_load,
        "reason": reading.reason or None,
    }


def read_samples(report: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a report that `as_json` made.

    Raises ValueError for another file, and if it was made on another processor: its turns cannot be added to those of
    this one.
    """
    if "rows" not in report:
        raise ValueError("not a report of this command: leave the file out")
    if (processor := report["machine"]["processor"]) != read_processor_name():
        raise ValueError(f"measured on {processor}, and this is {read_processor_name()}: leave the file out")
    return [_read_sample(each) for each in report["rows"]]


def _read_sample(each: Mapping[str, Any]) -> Sample:
    row = Row(each["what"], each["unit"], each["lower_is_better"], each["goal"], each["digits"], each["peers"])
    reading = Reading(row, each["value"], each["limit"], each["reason"] or "", each["used_by_others"])
    return Sample(Table(**each["table"]), each["variant"], each["turn"], reading)


# ---------------------------------------------------------------- documents
def update_section(file: Path, mark: str, text: str) -> None:
    """Replace the section `mark` of a file with a text. Raises OSError, and ValueError if there is no such section."""
    file.write_text(replace_section(file.read_text(), mark, text.strip()))


def replace_section(document: str, mark: str, text: str) -> str:
    """Return the document with `text` in the section of the program `mark`. Raises ValueError if there is none."""
    begin, end = f"<!-- printed by {mark} -->", f"<!-- end of {mark} -->"
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not found.search(document):
        raise ValueError(f"the document has no section between {begin} and {end}: add both lines")
    return found.sub(lambda _: f"{begin}\n{text}\n{end}", document)

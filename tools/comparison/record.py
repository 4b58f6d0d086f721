"""Keeps what a comparison has measured so far in a folder, so that it goes on after an interruption.

The folder has plan.json (what is compared, by which versions), cells.jsonl (a line for each measured cell),
fidelity.json, contracts.json (which strategies promise to be exact), and the data of Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.comparison.figures import Interval, Reading
from tools.comparison.plan import Cell, Load

PLAN, CELLS, FIDELITY, CONTRACTS = "plan.json", "cells.jsonl", "fidelity.json", "contracts.json"


class RecordError(Exception):
    """The folder has another comparison, or a damaged file; the message says what to do."""


@dataclass(frozen=True)
class CellResult:
    """What was measured in a cell."""

    cell: Cell
    interval: Interval
    figures: Mapping[str, Reading]  # by name
    requests: int
    errors: Mapping[str, int]  # numbers of failed requests, by message


@dataclass
class Record:
    """The measured cells of a comparison, each written to the folder as soon as it is measured."""

    folder: Path
    results: dict[Cell, CellResult] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)  # reports of `kvmux evaluate`, by prompt length as text
    exact: dict[str, bool] = field(default_factory=dict)  # whether each strategy promises to drop and round nothing

    @classmethod
    def open(cls, folder: Path, description: Mapping[str, Any], *, restart: bool) -> Record:
        """Open a folder and read what an earlier run has measured.

        Raises RecordError if it is another comparison than `description`, and OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        plan, *others = (folder / name for name in (PLAN, CELLS, FIDELITY, CONTRACTS))
        if restart:
            for file in (plan, *others):
                file.unlink(missing_ok=True)
        if not plan.exists():
            plan.write_text(json.dumps(description, indent=2) + "\n")
            return cls(folder)
        try:
            if json.loads(plan.read_text()) != json.loads(json.dumps(description)):
                raise RecordError(
                    f"{folder} has another comparison (see {PLAN} there): give another folder by --out, or --restart"
                )
            results = [_read_cell(json.loads(line)) for line in _read_whole_lines(folder / CELLS)]
            fidelity, exact = (_read_object(folder / name) for name in (FIDELITY, CONTRACTS))
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{folder} has a damaged file ({error}): measure again with --restart") from None
        return cls(folder, {each.cell: each for each in results}, fidelity, exact)

    def add(self, result: CellResult) -> None:
        """Add a measured cell. Raises OSError."""
        self.results[result.cell] = result
        with (self.folder / CELLS).open("a") as lines:
            lines.write(json.dumps(_write_cell(result)) + "\n")

    def set_fidelity(self, length: int, report: dict[str, Any]) -> None:
        """Set the fidelity of all strategies at a prompt length. Raises OSError."""
        self.fidelity[str(length)] = report
        (self.folder / FIDELITY).write_text(json.dumps(self.fidelity) + "\n")

    def lacks_fidelity(self, length: int) -> bool:
        """Return whether the fidelity at a prompt length was not measured, or without success."""
        return "error" in self.fidelity.get(str(length), {"error": "not measured"})

    def set_exact(self, exact: dict[str, bool]) -> None:
        """Set which strategies promise to be exact. Raises OSError."""
        self.exact = exact
        (self.folder / CONTRACTS).write_text(json.dumps(exact) + "\n")


def _read_object(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _read_whole_lines(file: Path) -> list[str]:
    """Return the lines of a file; one that was not written to its end is removed, so that the next line is whole."""
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return whole.splitlines()


def _write_cell(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    return {
        "round": cell.round,
        "prompt_tokens": cell.load.prompt_tokens,
        "batch": cell.load.batch,
        "strategy": cell.strategy,
        "interval": result.interval._asdict(),
        "figures": {name: each._asdict() for name, each in result.figures.items()},
        "requests": result.requests,
        "errors": dict(result.errors),
    }


def _read_cell(line: Mapping[str, Any]) -> CellResult:
    return CellResult(
        Cell(line["round"], Load(line["prompt_tokens"], line["batch"]), line["strategy"]),
        Interval(**line["interval"]),
        {name: Reading(**each) for name, each in line["figures"].items()},
        line["requests"],
        line["errors"],
    )

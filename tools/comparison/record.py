"""Keeps what a comparison has measured so far in a folder, so that it goes on after an interruption.

The folder has plan.json (what is compared, by which versions), cells.jsonl (a line for each measured cell),
fidelity.json, and the data of Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.comparison.figures import Interval, Reading
from tools.comparison.plan import Cell, Load

PLAN, CELLS, FIDELITY = "plan.json", "cells.jsonl", "fidelity.json"


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
    fidelity: dict[str, Any] | None = None  # the report of `kvmux evaluate` for each prompt length

    @classmethod
    def open(cls, folder: Path, description: Mapping[str, Any], *, restart: bool) -> Record:
        """Open a folder and read what an earlier run has measured.

        Raises RecordError if it is another comparison than `description`, and OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        plan, cells, fidelity = folder / PLAN, folder / CELLS, folder / FIDELITY
        if restart:
            for file in (plan, cells, fidelity):
                file.unlink(missing_ok=True)
        if not plan.exists():
            plan.write_text(json.dumps(description, indent=2) + "\n")
            return cls(folder)
        try:
            if json.loads(plan.read_text()) != json.loads(json.dumps(description)):
                raise RecordError(
                    f"{folder} has another comparison (see {PLAN} there): give another folder by --out, or --restart"
                )
            lines = cells.read_text().splitlines() if cells.exists() else []
            results = [_read_cell(json.loads(line)) for line in lines]
            found = json.loads(fidelity.read_text()) if fidelity.exists() else None
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{folder} has a damaged file ({error}): measure again with --restart") from None
        return cls(folder, {each.cell: each for each in results}, found)

    def add(self, result: CellResult) -> None:
        """Add a measured cell. Raises OSError."""
        self.results[result.cell] = result
        with (self.folder / CELLS).open("a") as lines:
            lines.write(json.dumps(_write_cell(result)) + "\n")

    def set_fidelity(self, fidelity: dict[str, Any]) -> None:
        """Set the fidelity of all strategies. Raises OSError."""
        self.fidelity = fidelity
        (self.folder / FIDELITY).write_text(json.dumps(fidelity) + "\n")


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

"""A report names what was disturbed or failed, goes through JSON unchanged, and replaces its section of a document."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from tools.bench import growth, peers, report, rows
from tools.bench.report import DISTURBED_MARK, Report, as_json, as_text, read_samples, replace_section
from tools.bench.runner import Failure, Reading, Row, Sample, Table

ROOT = Path(__file__).parents[3]
DATE = datetime(2026, 1, 2).astimezone()
GOAL = Row("slow", "tokens/s", lower_is_better=False, goal=27, peers={"x": 30, "y": 20})
STEP = Row("a step", "ms")
TURNS = Table("servers", base="ours")


def make_samples(table: Table = TURNS) -> list[Sample]:
    """Return two turns of two variants, of which one is twice as fast."""
    return [
        Sample(table, name, turn, Reading(STEP, times * turn, limit=0.5 * turn, background_load=0.0))
        for turn in (1, 2)
        for name, times in (("ours", 10.0), ("theirs", 20.0))
    ]


def test_a_row_with_a_goal_says_whether_it_was_met_and_disturbed() -> None:
    slow = Sample(Table("m"), "", 1, Reading(GOAL, 15.0, 30.0, background_load=0.2))
    text = as_text(Report(DATE, [slow]))
    assert f"| slow, tokens/s | 15.0{DISTURBED_MARK} | 27.0 | no | x 30.0 | y 20.0 | 30.0 | 50% |" in text
    assert "used up to 20% of the machine" in text
    told = as_json(Report(DATE, [slow]))["rows"][0]
    assert (told["value"], told["goal"], told["met"], told["of_the_limit"], told["used_by_others"]) == (
        15.0,
        27,
        False,
        0.5,
        0.2,
    )


def test_variants_have_medians_the_share_of_the_limit_and_ratios() -> None:
    text = as_text(Report(DATE, make_samples()))
    assert "| a step, ms | 15.0 (0.75, 5%) | 30.0 (0.75, 2%) |" in text
    assert "| times as fast as | theirs |\n|---|---:|\n| a step | 2.00 (2.00 to 2.00; 50%) |" in text
    reverse = as_text(Report(DATE, make_samples(Table("servers", base="ours", compares_others=True))))
    assert "| times as fast as ours | theirs |\n|---|---:|\n| a step | 0.50 (0.50 to 0.50; 50%) |" in reverse
    assert "disturbed" not in text
    assert "times as fast" not in as_text(Report(DATE, make_samples(Table("servers"))))
    by_variant = as_text(Report(DATE, make_samples(Table("servers", variants_are_rows=True))))
    assert "|  | a step, ms |\n|---|---:|\n| ours | 15.0 (0.75, 5%) |" in by_variant


def test_what_was_not_measured_is_named_with_its_reason() -> None:
    missing = Sample(TURNS, "theirs", 3, Reading(STEP, None, reason="out of\nmemory"))
    text = as_text(Report(DATE, [*make_samples(), missing], [Failure("8 at once", "no server")], ["a note"]))
    assert "- a note" in text
    assert "- 8 at once was not measured: no server" in text
    assert "- theirs, a step: out of memory" in text


def test_samples_go_through_json_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [*make_samples(), Sample(Table("m"), "", 1, Reading(GOAL, 15.0, 30.0, "why", 0.2))]
    written = json.loads(json.dumps(as_json(Report(DATE, samples))))
    assert read_samples(written) == samples
    monkeypatch.setattr(report, "read_processor_name", lambda: "another")
    with pytest.raises(ValueError, match="leave the file out"):
        read_samples(written)


def test_a_document_gets_what_was_printed() -> None:
    document = "before\n<!-- printed by it -->\nold\n<!-- end of it -->\nafter\n"
    new = replace_section(document, "it", r"a \1 table")
    assert new == document.replace("old", r"a \1 table")
    assert replace_section(new, "it", "old") == document
    with pytest.raises(ValueError, match="has no section"):
        replace_section("nothing", "it", "x")


@pytest.mark.parametrize(
    ("file", "mark"),
    [
        (rows.GROUP.document, rows.GROUP.command),
        (peers.GROUP.document, peers.GROUP.command),
        (growth.GROUP.document, "python -m tools.bench growth"),
        *((rows.PERFORMANCE, mark) for mark in rows.PROFILES.values()),
    ],
)
def test_committed_documents_have_their_places(file: str, mark: str) -> None:
    document = (ROOT / "docs" / "laboratory" / file).read_text()
    assert "here it is" in replace_section(document, mark, "here it is")

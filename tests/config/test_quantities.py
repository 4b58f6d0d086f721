"""Shares, durations and sizes as people write them, and every setting that is one."""

from __future__ import annotations

import random
from argparse import ArgumentTypeError
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from config.errors import SettingsError
from config.quantities import parse_duration, parse_duration_flag, parse_proportion, parse_share_flag
from config.settings import SelectionRule, Settings, load_settings
from config.units import Duration, Proportion, Size, find_unit

UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
WORDS = {"timeout", "seconds", "aging", "wait", "bytes", "share", "memory"}  # in names of settings that have a unit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30.0), ("2.5", 2.5), ("1e2", 100.0), ("500ms", 0.5), ("30s", 30.0), ("10m", 600.0), ("1h", 3600.0),
        ("1h30m", 5400.0), ("1h 30m", 5400.0), (" 90 s ", 90.0), ("1.5h", 5400.0), ("2d", 172800.0), ("0", 0.0),
        ("1m500ms", 60.5), ("0.1s", 0.1), ("1d1h1m1s1ms", 90061.001), ("-3", -3.0),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_durations_are_what_the_standard_library_says(rng: random.Random) -> None:
    for _ in range(500):
        counts = {unit: rng.choice([rng.randrange(1000), round(rng.uniform(0, 99), 3)]) for unit in UNITS}
        chosen = {unit: counts[unit] for unit in reversed(UNITS) if rng.random() < 0.6} or {"s": 1}
        text = rng.choice(["", " "]).join(f"{count}{unit}" for unit, count in chosen.items())
        delta = timedelta(**{UNITS[unit]: count for unit, count in chosen.items()})
        assert parse_duration(text) == pytest.approx(delta.total_seconds(), abs=1e-5), text


@pytest.mark.parametrize(
    "text", ["", " ", "soon", "m", "10x", "5m3", "30m1h", "1h1h", "nan", "inf", "-1m", "1,5h", "9" * 400, "10 M"]
)
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration: write a number of seconds, or a text such as '500ms'"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "share"), [("25%", 0.25), ("0.25", 0.25), ("12.5 %", 0.125), ("0%", 0.0), ("100%", 1.0), ("1e-3", 1e-3)]
)
def test_proportions(text: str, share: float) -> None:
    assert parse_proportion(text) == share


@pytest.mark.parametrize("text", ["", "%", "much", "-5%", "1/4", "nan", "inf", "25 percent", "1e2%"])
def test_no_proportions(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a share: write a percentage such as '25%', or a number"):
        parse_proportion(text)


def test_flags_say_what_is_wrong() -> None:
    assert (parse_duration_flag("1m"), parse_share_flag("25%"), parse_share_flag("0")) == (60.0, 0.25, 0.0)
    for text in ("0", "-1", "soon"):
        with pytest.raises(ArgumentTypeError, match=f"'{text}' is not a duration"):
            parse_duration_flag(text)
    for text in ("101%", "-1", "25"):
        with pytest.raises(ArgumentTypeError, match=f"'{text}' should be from 0% to 100%"):
            parse_share_flag(text)


def test_every_setting_with_a_unit_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, a variable and a file take the text; what is shown is the number."""
    texts = {"share": ("25%", 0.25), "duration": ("1h30m", 5400.0), "size": ("2MiB", 2 << 20)}
    named = [name for name, field in Settings.model_fields.items() if find_unit(field)]
    assert {"kv_memory_share", "queue_timeout", "max_body_bytes", "drain_seconds", "priority_aging"} <= set(named)
    for name in named:
        unit = find_unit(Settings.model_fields[name])
        assert unit is not None
        text, number = texts[unit.name]
        file = tmp_path / "kvmux.toml"
        file.write_text(f'{name} = "{text}"')
        by_number = load_settings(None, {name: number}).model_dump(mode="json")[name]
        with monkeypatch.context() as environment:
            environment.setenv(f"KVMUX_{name.upper()}", text)
            every = [load_settings(None, {name: text}), load_settings(file, {}), load_settings(None, {})]
        for settings in every:
            shown = settings.model_dump(mode="json")[name]
            assert (shown, type(shown)) == (by_number, type(by_number)) == (number, type(number)), name


def test_no_setting_whose_name_says_a_unit_is_without_it() -> None:
    texts = {"kv_memory", "text_memory", "grammar_memory"}  # they are kept as text, and take "2GiB", too
    for name, field in Settings.model_fields.items():
        assert not WORDS & set(name.split("_")) or name in texts or field.annotation is bool or find_unit(field), name


def test_tables_of_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "kvmux.toml"
    file.write_text(
        '[[rules]]\nuse = "paged"\nkv_usage_above = "80%"\n'
        '[rollouts.mine]\nfrom = "paged"\nto = "contiguous"\nhold = "10m"\nguard = {top1 = "98%", errors = "1%"}'
    )
    settings = load_settings(file, {})
    rollout = settings.rollouts["mine"]
    assert (settings.rules[0].kv_usage_above, rollout.hold) == (0.8, 600.0)
    assert (rollout.guard.top1, rollout.guard.errors) == (0.98, 0.01)
    with pytest.raises(SettingsError, match=r"rules\.0\.kv_usage_above .*: should be 1 or less"):
        load_settings(None, {"rules": [{"use": "paged", "kv_usage_above": "101%"}]})


@pytest.mark.parametrize("kind", [Duration, Proportion, Size])
def test_the_json_schema_says_that_a_text_is_taken(kind: type) -> None:
    schema = TypeAdapter(kind).json_schema()
    assert {"type": "string"} in schema["anyOf"]
    assert len(schema["anyOf"]) == 2
    table = SelectionRule.model_json_schema()["properties"]["kv_usage_above"]
    assert "string" in str(table)

"""Instances are written as TOML that reads back equal."""

from __future__ import annotations

import tomllib

from tools.strategies_file import format_strategies


def test_instances_read_back_equal() -> None:
    instances = {
        "paged": {"kind": "paged"},
        'a "b"\n.c': {"kind": "my:Class", "budget": 0.25, "deep": {"x.y": {"z": True}, "n": 3}, "names": ["a", "b"]},
    }
    assert tomllib.loads(format_strategies(instances)) == {"strategies": instances}


def test_options_without_a_value_are_left_out() -> None:
    assert format_strategies({"p": {"kind": "paged", "ttl": None}}) == '[strategies."p"]\n"kind" = "paged"\n'

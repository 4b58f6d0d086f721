"""Settings are written as TOML that reads back equal."""

from __future__ import annotations

import tomllib

from config.settings_file import format_settings, format_tables


def test_tables_read_back_equal() -> None:
    tables = {
        "paged": {"kind": "paged"},
        'a "b"\n.c': {"kind": "my:Cläss 🙂", "budget": 0.25, "deep": {"x.y": {"z": True}, "n": 3}, "names": ["a", "b"]},
    }
    assert tomllib.loads(format_tables("strategies", tables)) == {"strategies": tables}


def test_names_are_plain_where_they_can_be_and_what_has_no_value_is_left_out() -> None:
    tables = {"p-1": {"kind": "paged", "ttl": None, "options": {"a": 1, "b c": 2}}}
    assert format_tables("strategies", tables) == '[strategies.p-1]\nkind = "paged"\noptions.a = 1\noptions."b c" = 2\n'
    assert format_settings({"threads": 2, "model": None}) == "threads = 2\n"

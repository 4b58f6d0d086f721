"""`kvmux ray` without Ray: help, flags that cannot be, and what to install."""

from __future__ import annotations

import importlib.util

import pytest

from server.cli import main as cli


def test_without_ray_the_error_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["ray", "up", "--replicas", "2"]) == 2
    printed = capsys.readouterr()
    assert "pip install 'kvmux[ray]'" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--replicas", "0"], ["--replicas", "two"], ["--gpus-per-replica", "-1"]])
def test_impossible_numbers_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["ray", "up", *flags])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert flags[0] in printed
    assert printed.startswith("kvmux ray up: ")


def test_help_lists_the_flags_of_replicas_and_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["ray", "up", "--help"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--replicas", "--max-replicas", "--address", "--kv-memory", "--api-keys"))

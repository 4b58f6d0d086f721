"""Servers are measured by turns with the same workloads, and a server that fails has its reason in the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from loadtest.bench.arrivals import Closed
from loadtest.bench.workloads import NAMED_WORKLOADS, Drawn
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench import __main__ as command
from tools.bench import peers
from tools.bench.limits import Speeds
from tools.bench.rows import MISSING
from tools.peers.programs import ServerProgram, StartCommand
from tools.peers.servers import OURS


def find_children() -> set[psutil.Process]:
    """Return the processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def fail(name: str, code: str) -> ServerProgram:
    """Return a server that runs `code` in Python."""
    return ServerProgram(name, "1", "/health", lambda needs, port: StartCommand([sys.executable, "-c", code]))


@pytest.mark.apart
@pytest.mark.parametrize("more", [[], ["--decode-only"]])
def test_kvmux_is_measured_beside_a_server_that_does_not_start(
    more: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers have a context so short that the client shortens its workloads, and the machine is not measured."""
    monkeypatch.setitem(NAMED_WORKLOADS, "e8", Drawn("e8", Closed(8), requests=8, prompt_tokens=40, max_tokens=12))
    monkeypatch.setitem(NAMED_WORKLOADS, "a", Drawn("a", Closed(1), requests=2, prompt_tokens=20, max_tokens=6))
    monkeypatch.setattr(peers, "measure_speeds", lambda row: Speeds(20e9, 1e12))
    monkeypatch.setattr(peers, "make_model", lambda *_: folder / SMALL_SHAPE.name)
    broken = fail("broken", "print('no such model'); raise SystemExit(3)")
    monkeypatch.setattr(peers, "PEERS", {"broken": lambda model, installer: broken})
    others, file = find_children(), tmp_path / "it.json"
    arguments = ["--peers", "broken", "--rows", "a", "e8", "--turns", "2", "--json", str(file), *more]
    assert command.main(["peers", *arguments]) == 0
    found = json.loads(file.read_text())["rows"]
    ours, theirs = ([each for each in found if each["variant"] == name] for name in (OURS, "broken"))
    rows = [row for row in peers.list_rows(["a", "e8"]) if not more or row.measure in peers.DECODING]
    assert {each["what"] for each in ours} == {row.what for row in rows}
    for each in ours:
        assert each["limit"] is not None
        if each["value"] is None:  # such short answers may end early, or come in one piece
            assert each["reason"] in MISSING.values()
        else:
            assert each["value"] > 0, each["reason"]
    assert len(ours) == 2 * len(rows)
    assert len(theirs) == len(rows), "a server that did not start is not started again"
    assert all(each["value"] is None and "no such model" in each["reason"] for each in theirs)
    assert find_children() <= others


def test_a_command_is_shown_without_folders_of_the_machine() -> None:
    shown = StartCommand(["/home/x/bin/serve", "--model", "/home/x/m"], {"LD_PRELOAD": "/a/b.so", "N": "2"}).describe()
    assert shown == "LD_PRELOAD=b.so N=2 serve --model m"

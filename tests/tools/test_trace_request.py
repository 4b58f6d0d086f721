"""The ways in docs/internals/request_path.md are those that a server's requests take."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tools.trace_request import ROOT, Call, collect, find_body_way, find_token_way, intersect

DOCUMENT = ROOT / "docs" / "internals" / "request_path.md"
ITEM = re.compile(r"^\d+\. `(?P<file>[^`]+\.py)`(?P<functions>(?:,? `[^`]+`)*)", re.MULTILINE)
Way = dict[str, list[str]]


@pytest.fixture(scope="module")
def traced() -> dict[str, Way]:
    """What the tool finds, in a process of its own: it traces all threads of its process."""
    program = "import json; from tools.trace_request import trace_requests; print(json.dumps(trace_requests()))"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    ways: dict[str, Way] = json.loads(ended.stdout)
    return ways


def read_section(title: str) -> Way:
    """Return the files of a section's numbered list with the functions that are named there."""
    text = DOCUMENT.read_text()
    assert f"\n## {title}\n" in text, f"{DOCUMENT.name} has no section '{title}'"
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = {item["file"]: re.findall(r"`([^`]+)`", item["functions"]) for item in ITEM.finditer(section)}
    return {file if (ROOT / file).exists() else f"server/{file}": functions for file, functions in found.items()}


@pytest.mark.parametrize(
    ("title", "way"),
    [("A request body's way", "body"), ("One token's way", "step"), ("A token's way back", "streamed_token")],
)
def test_the_document_names_files_and_functions_on_a_way(title: str, way: str, traced: dict[str, Way]) -> None:
    """It names those that a reader has to know: a file that is missing there is not an error."""
    described, found = read_section(title), traced[way]
    assert len(described) > 8
    for file, functions in described.items():
        not_called = set(functions) - {*found.get(file, ())}
        assert functions, f"'{title}' names no function of {file}"
        assert not not_called, f"'{title}': {not_called} of {file} are not called; called are {found.get(file)}"


def test_the_document_says_about_how_many_files_are_on_each_way(traced: dict[str, Way]) -> None:
    counts = re.search(r"all (\d+) files of a body, (\d+) of a\s+step and (\d+) of a token", DOCUMENT.read_text())
    assert counts is not None
    for count, way in zip(counts.groups(), ("body", "step", "streamed_token"), strict=True):
        assert abs(int(count) - len(traced[way])) <= 2, f"{way}: {len(traced[way])}"  # background work may come in


def test_a_whole_response_takes_the_same_way_and_that_of_its_format(traced: dict[str, Way]) -> None:
    others = traced["last_token_of_a_whole_response"].keys() - traced["streamed_token"].keys()
    assert {"server/api/openai/completions.py", "server/api/openai/generation_job.py"} <= others


# ---------------------------------------------------------------- how calls become ways
WORKER, GATEWAY, ENGINE = 1, 2, 3


def call(thread: int, function: str, file: str = "", kind: str = "call") -> Call:
    return Call(kind, thread, file or f"{function.partition('.')[0]}.py", function)


def test_a_thread_is_on_a_bodys_way_until_it_hands_the_body_on() -> None:
    calls = [
        call(ENGINE, "Heartbeat.beat"),
        call(WORKER, "BoundedConnection.data_received"),
        call(ENGINE, "Heartbeat.beat"),
        call(WORKER, "SocketClient._send", kind="return"),
        call(WORKER, "SocketClient._submit"),
        call(WORKER, "encode"),
        call(WORKER, "SocketClient._submit", kind="return"),
        call(WORKER, "Detokenizer.__init__"),
        call(GATEWAY, "EngineServer._serve_worker"),
        call(ENGINE, "Loop._handle"),
        call(ENGINE, "Core.submit"),
        call(ENGINE, "Scheduler.submit"),
        call(ENGINE, "Scheduler.schedule"),
    ]
    files = ["BoundedConnection", "SocketClient", "encode", "EngineServer", "Loop", "Core", "Scheduler"]
    assert list(find_body_way(calls)) == [f"{name}.py" for name in files]


def test_a_tokens_way_leads_from_the_engine_to_the_text() -> None:
    calls = [
        call(ENGINE, "ModelRunner.execute", kind="return"),
        call(ENGINE, "Core.step"),
        call(WORKER, "Heartbeat.beat"),
        call(ENGINE, "EngineServer.send"),
        call(ENGINE, "EngineServer.send", kind="return"),
        call(ENGINE, "Core.poll"),
        call(WORKER, "_Connection.data_received", "client.py"),
        call(WORKER, "OutputText.push"),
        call(WORKER, "RequestResponseCycle.send"),
        call(WORKER, "OutputText.pop"),
    ]
    found = ["ModelRunner.py", "Core.py", "EngineServer.py", "client.py", "OutputText.py"]
    assert list(find_token_way(calls, 0)) == found


def test_what_is_not_called_in_every_request_is_on_no_way() -> None:
    one, other = collect([call(1, "a.x"), call(1, "a.y"), call(1, "b.x")]), collect([call(1, "b.x"), call(1, "a.y")])
    assert intersect([one, other]) == {"a.py": ["a.y"], "b.py": ["b.x"]}


def test_a_function_with_another_name_is_named() -> None:
    with pytest.raises(LookupError, match=r"BoundedConnection\.data_received was not called"):
        find_body_way([])

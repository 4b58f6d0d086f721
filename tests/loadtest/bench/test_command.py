"""`kvmux bench` against a stub: the table, the JSON, exit codes, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import traces
from server.cli import main as cli
from tests.loadtest.stub_server import CACHED_TOKENS, StubServer, running_stub

STRATEGIES = ("tiny", "tiny:paged", "tiny:window")
FEW = ("--rounds", "2", "--requests", "3", "--prompt-tokens", "10", "--max-tokens", "4")


def bench(capsys: pytest.CaptureFixture[str], stub: StubServer | None, *flags: str) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    try:
        code = cli.main(["bench", *(["--url", stub.url] if stub else []), *flags])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return code, *capsys.readouterr()


def rows(output: str) -> list[list[str]]:
    """Return the cells of the table, its head first."""
    lines = [line for line in output.splitlines() if line.startswith("|") and set(line) - set("|-: ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_row_for_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    with running_stub(*STRATEGIES) as stub:
        code, output, errors = bench(capsys, stub, *FEW)
    assert (code, errors) == (0, "")
    head, *found = rows(output)
    assert head[:5] == ["workload", "what it is", "strategy", "requests", "errors"]
    what = "8 at once, 10 tokens in, 4 out"
    assert [row[:5] for row in found] == [["own", what, "paged", "6", "0"], ["own", what, "window", "6", "0"]]
    assert all(row[-1] == f"{CACHED_TOKENS / 10:.0%}" for row in found)
    assert all(float(cell.replace(",", "")) > 0 for row in found for cell in row[5:-1])
    assert output.startswith(f"tiny at {stub.url} (stub 0.0)\n")
    assert {body["model"] for body in stub.bodies} == {"tiny:paged", "tiny:window"}
    assert {len(body["prompt"]) for body in stub.bodies} == {10}


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ("--shared-tokens", "20", "--strategies", "window", "--seed", "5", "--api-key", "secret")
    with running_stub(*STRATEGIES, key="secret") as stub:
        code, output, _ = bench(capsys, stub, *FEW, *flags, "--json", str(file))
        assert code == 0
        assert len(rows(output)) == 3
        code, printed, _ = bench(capsys, stub, *FEW, *flags, "--json", "-")
    written, told = json.loads(file.read_text()), json.loads(printed)
    assert written["server"] == {
        "url": stub.url,
        "software": "stub",
        "version": "0.0",
        "model": "tiny",
        "context": 2048,
        "strategies": ["paged", "window"],
    }
    assert written["options"] | {"seed": 5, "rounds": 2, "requests": 3, "shared_tokens": 20} == written["options"]
    assert "secret" not in file.read_text()
    assert written["date"] <= told["date"]
    assert [(each["phase"], each["strategy"]) for each in written["results"]] == [
        ("cold", "window"),
        ("warm", "window"),
    ]
    assert [shape(each) for each in written["results"]] == [shape(each) for each in told["results"]]
    for result in written["results"]:
        assert result["what"] == written["workloads"][0]["what"] == "8 at once, 20 shared + 10 tokens in, 4 out"
        assert result["requests"] == 6
        assert result["completion_tokens"] == result["pieces"] == 24
        assert result["prompt_tokens"] == 6 * 30
        assert result["cached_tokens"] == 6 * CACHED_TOKENS
        assert len(result["tokens_per_second_by_round"]) == 2
        for times in ("ttft_ms", "itl_ms", "e2e_ms"):
            assert 0 <= result[times]["p50"] <= result[times]["p95"] <= result[times]["max"]


def shape(result: dict[str, Any]) -> dict[str, Any]:
    """Check what does not depend on time; whether all streams ever decode together does."""
    return {
        key: sorted(value) if isinstance(value, dict) else value
        for key, value in result.items()
        if "second" not in key and key != "full_batch_itl_ms"
    }


def test_a_server_without_strategies_ids_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with running_stub("llama3:8b", tokenizes=False, tells_cached=False) as stub:
        stub.context = None
        code, output, _ = bench(capsys, stub, *FEW, "--body", '{"ignore_eos": null}')
    assert code == 0
    head, row = rows(output)
    assert head[2] == "model"
    assert row[2] == "llama3:8b"
    assert row[-1] == "-"
    assert "note: the server has no /tokenize" in output
    assert "note: 6 answers do not have the requested length" in output
    assert all(isinstance(body["prompt"], str) and "ignore_eos" not in body for body in stub.bodies)


def test_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorded = list(traces.generate_trace(0, 8))
    file.write_text("".join(traces.format_line(request) + "\n" for request in recorded))
    with running_stub(*STRATEGIES) as stub:
        stub.context = 300
        code, output, _ = bench(capsys, stub, "--trace", str(file), "--speed-up", "1e6", "--requests", "6")
    assert code == 0
    what = "6 requests as recorded, 1e+06 times as fast"
    assert [row[:4] for row in rows(output)[1:]] == [["trace", what, "paged", "6"], ["trace", what, "window", "6"]]
    assert "prompts are cut to fit into the model's 300 tokens" in output
    assert all(len(body["prompt"]) + body["max_tokens"] <= 300 for body in stub.bodies)


def test_failed_requests_are_told_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    broken = ("busy", "failing", "odd")
    with running_stub("tiny", "tiny:paged", *(f"tiny:{name}" for name in broken)) as stub:
        code, output, errors = bench(capsys, stub, *FEW)
    assert code == 1
    assert [row[2:5] for row in rows(output)[1:]] == [["paged", "6", "0"], *([name, "6", "6"] for name in broken)]
    assert errors.splitlines()[0] == "kvmux: 18 requests failed:"
    assert "  6x a line of the stream is not a part of an answer: " in errors
    assert "  6x HTTP 429: too many requests wait" in errors
    assert "  6x error in the stream: the engine is gone" in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--strategies", "pagd"), "there is no strategy 'pagd'; there are paged, window"),
        (("--model", "big"), "there is no model 'big'; there are tiny"),
        (("--trace", "none.jsonl"), "--trace: cannot read none.jsonl: No such file or directory"),
        (("--trace", "none.jsonl", "--workload", "a"), "--trace cannot be combined with --workload"),
        (("--json", "no/such/folder"), "--json: cannot write no/such/folder"),
        (("--rate", "1", "--burst", "2"), "--burst: not allowed with argument --rate"),
        (("--rate", "0"), "--rate: '0' is not a number above 0"),
        (("--requests", "-3"), "--requests: '-3' is not a whole number above 0"),
        (("--body", "[]"), "--body: '[]' is not a JSON object"),
        (("--body", '{"temperature": NaN}'), "--body: '{\"temperature\": NaN}' is not a JSON object"),
        (("--body", '{"priority": 1e999}'), "is not a JSON object"),
        (("--body", r'{"user": "\ud800"}'), "is not a JSON object"),
        (("--api-key", "ü€"), "--api-key or OPENAI_API_KEY: a key consists of ASCII"),
        (("--api-key", "one\ntwo"), "--api-key or OPENAI_API_KEY: a key consists of ASCII"),
        (("--url", "http://127.0.0.1:99999"), "--url 'http://127.0.0.1:99999': 99999 is not a port"),
        (("--workload", "e"), "invalid choice: 'e'"),
        (("--concurency", "3"), "did you mean --concurrency?"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    with running_stub(*STRATEGIES) as stub:
        code, output, errors = bench(capsys, stub, *flags)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_an_old_report_stays_until_there_is_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    code, _, _ = bench(capsys, None, "--url", "http://127.0.0.1:9", "--json", str(file))
    assert (code, file.read_text()) == (2, "old")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_what_cannot_be_written_is_printed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with running_stub(*STRATEGIES) as stub:
        code, output, errors = bench(capsys, stub, *FEW, "--json", "/dev/full")
    assert code == 2
    assert len(rows(output)) == 3
    assert errors == "kvmux: --json: cannot write /dev/full: No space left on device\n"


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = bench(capsys, None, "--url", "http://127.0.0.1:9")
    assert (code, output) == (2, "")
    assert "start one (kvmux serve), or choose another (--url)" in errors
    assert errors.count("\n") == 1

"""`kvmux evaluate` from the command line to its files."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.errors import SettingsError
from config.settings import default_strategies
from server.cli.main import main
from server.evaluation.command import parse_strategy
from server.evaluation.compare import Fidelity
from server.evaluation.report import EvaluationReport, StrategyResult, as_table
from tests.engine.isolation.faulty_strategies import faulty

STRATEGIES = ("paged", "sliding_window:window=16,sinks=0", "sliding_window:window=600")
SMALL = ("--length", "150", "--texts", "2", "--records", "2", "--threads", "1", "--dtype", "float32")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(["evaluate", *arguments])
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def written(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """The table, the JSON and the plot of one run."""
    folder = tmp_path_factory.mktemp("evaluation")
    flags = [part for name in STRATEGIES for part in ("--strategy", name)]
    outputs = ["--json", str(folder / "report.json"), "--plot", str(folder / "report.png")]
    with pytest.MonkeyPatch.context() as patch, (folder / "out").open("w+") as out:
        patch.setattr(sys, "stdout", out)
        assert main(["evaluate", "--model", str(model_directory), *SMALL, *flags, *outputs]) == 0
        out.seek(0)
        table = out.read()
    return table, json.loads((folder / "report.json").read_text()), folder / "report.png"


def test_table_has_a_line_a_strategy(written: tuple[str, dict[str, Any], Path]) -> None:
    table, report, _ = written
    header, rule, *lines = table.splitlines()
    assert [cell.strip() for cell in header.split("|")[1:4]] == ["strategy", "KV memory", "perplexity"]
    assert [cell.strip() for cell in header.split("|")[-4:-1]] == ["recall 1-64", "recall 65-128", "recall 129-150"]
    assert set(rule) <= set("|-: ")
    names = ["paged", "sliding_window-window16-sinks0", "sliding_window-window600"]
    assert [line.split("|")[1].strip() for line in lines] == names == [s["name"] for s in report["strategies"]]
    assert len({len(line) for line in (header, *lines)}) == 1


def test_json_says_what_was_measured(written: tuple[str, dict[str, Any], Path]) -> None:
    report = written[1]
    assert report["exact"] == "paged"
    assert (report["dtype"], report["length"], report["source"]) == ("float32", 150, "stories")
    assert report["row_tokens"] == 16  # the narrow ring takes no more in a step
    paged, narrow, wide = report["strategies"]
    assert narrow["kind"] == "sliding_window"
    formats = {"k_dtype": "model", "v_dtype": "model", "hadamard": True, "center": True}
    assert narrow["options"] == {"window": 16, "sinks": 0, "max_row": None} | formats
    assert (paged["exact"], narrow["exact"], wide["exact"]) == (True, False, True)
    assert narrow["kv_bytes"] < paged["kv_bytes"]
    for part in ("text", "records"):
        assert paged[part]["tokens"] == 300
        assert (paged[part]["top1_agreement"], paged[part]["kl_nats"]) == (1, 0)
        assert wide[part] == paged[part]
        assert narrow[part]["kl_nats"] > 0
    spans = [(r["from"], r["to"]) for r in paged["records"]["recall"]]
    assert spans == [(1, 64), (65, 128), (129, 150)]
    assert all(0 <= r["right"] <= r["asked"] for s in report["strategies"] for r in s["records"]["recall"])


def test_only_the_end_of_texts_may_count_and_records_be_left_out(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    flags = ("--strategy", "sliding_window:window=16", "--last", "9", "--records", "0", "--json", str(file))
    code, out, _ = _run(capsys, "--model", str(model_directory), *SMALL, *flags)
    assert code == 0
    _, narrow = json.loads(file.read_text())["strategies"]
    assert (narrow["text"]["tokens"], narrow["records"]["tokens"]) == (2 * 9, 0)
    assert 0 < narrow["text"]["kl_median"] < narrow["text"]["kl_nats"] < narrow["text"]["kl_p99"]
    assert (narrow["records"]["kl_nats"], narrow["records"]["perplexity"]) == (None, None)
    assert out.splitlines()[-1].split("|")[8:10] == [f" {'-':>14} ", f" {'-':>11} "]


def test_plot_is_a_picture(written: tuple[str, dict[str, Any], Path]) -> None:
    picture = written[2].read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_the_exact_strategy_is_there_unasked(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a server. " * 20)
    wanted = ("--strategy", "sliding_window:window=16", "--strategy", "compressed")
    flags = (*wanted, "--text", str(text), "--row-tokens", "9")
    code, out, _ = _run(capsys, "--model", str(model_directory), *SMALL, *flags)
    assert code == 0
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:]] == [
        "exact_caching",
        "sliding_window-window16",
        "compressed",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy", "nonesuch"], "--strategy: there is no instance 'nonesuch'; there are contiguous, paged"),
        (["--strategy", "keydiff"], "keydiff is a scorer: write compressed:scorer=keydiff"),
        (["--strategy", "no_such_module:Cache"], "run the command in the folder that has it, set PYTHONPATH to that"),
        (["--strategy", "nonesuch:a=1"], "there is no cache strategy kind 'nonesuch'"),
        (["--strategy", "paged:colour=red"], "strategies.paged-colourred.colour is not an option of this kind"),
        (["--strategy", "paged:block_size"], "write KIND:option=value,option=value"),
        (["--strategy", "sliding_window:window=8,window=9"], "each option once"),
        (["--strategy", "paged:block_size=0"], "strategies.paged-block_size0.block_size"),
        (["--length", "4096"], "--length: should be from 2 to 512 tokens, the context of the model"),
        (["--length", "0"], "'0' is not a whole number above 0"),
        (["--question-at", "500"], "--question-at: should be from 128 to 480"),
        (["--records", "-3"], "'-3' is not a whole number from 0"),
        (["--text", "no/such/file"], "--text: cannot read no/such/file"),
        (["--json", "no/such/folder/a.json"], "--json: cannot write no/such/folder/a.json: No such file or directory"),
        (["--json", "."], "--json: cannot write .: Is a directory"),
        (["--plot", "no/such/folder/a.png"], "--plot: cannot write no/such/folder/a.png: No such file or directory"),
        (["--json", "/tmp/kvmux.png", "--plot", "/tmp/kvmux.png"], "--json and --plot are both"),
        (["--seed", "\udcff"], "'\\udcff' is not printable text"),
        (["--strategy", "sliding_window:window=99999999999999999999"], "window: should be 2,147,483,647 or less"),
        (["--plot", "report.gif"], "--plot report.gif: the name should end in .png, .svg, .pdf"),
        (["--model", "no/such/model"], "no model at 'no/such/model'"),
        (["--strateggy", "paged"], "--strateggy is not an option; did you mean --strategy?"),
    ],
)
def test_what_cannot_be_done_is_reported_in_a_line(
    model_directory: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    code, out, err = _run(capsys, "--model", str(model_directory), *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_matplotlib_is_asked_for_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert _run(capsys, "--plot", "a.png")[2] == "kvmux: --plot needs matplotlib: pip install 'kvmux[evaluate]'\n"


def test_what_cannot_be_written_after_all_loses_nothing_else(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(report: EvaluationReport, file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("server.evaluation.command.write_json", full)
    files = ("--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"))
    code, out, err = _run(capsys, "--model", str(model_directory), *SMALL, "--strategy", "paged", *files)
    assert code == 2
    assert out.count("paged") == 1
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert f"kvmux: --json: cannot write {tmp_path / 'a.json'}: No space left on device" in err


def test_files_come_before_a_terminal_that_fails(model_directory: Path, tmp_path: Path) -> None:
    flags = ["--model", str(model_directory), *SMALL, "--strategy", "paged", "--json", str(tmp_path / "a.json")]
    with subprocess.Popen(
        [sys.executable, "-m", "server", "evaluate", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()  # whoever was to read the table has gone
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 1
    assert json.loads((tmp_path / "a.json").read_text())["exact"] == "paged"


def test_all_instances_are_read_if_none_is_named(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shares of the server's memory do not get in the way."""
    file = tmp_path / "kvmux.toml"
    shares = '\n[strategies.paged]\nfloor = "60%"\n[strategies.contiguous]\nfloor = "40%"\nlimit = "40%"\n'
    file.write_text(f'model = "{model_directory}"{shares}')
    sizes = ("--length", "100", "--texts", "3", "--records", "3", "--threads", "1")
    code, out, _ = _run(capsys, "--config", str(file), *sizes)
    assert code == 0
    names = [line.split("|")[1].strip() for line in out.splitlines()[2:]]
    assert sorted(names) == ["contiguous", "paged", "sliding_window"]


CLASSES = """
from cache_strategies.scorers.base import Scorer
from cache_strategies.sliding_window import SlidingWindowCache


class Window(SlidingWindowCache):
    interface_version = 3


class Values(Scorer):
    def score(self, past):
        return past.values.norm(dim=-1)
"""


def test_classes_in_the_current_folder_are_read(model_directory: Path, tmp_path: Path) -> None:
    """By the command's own program, whose folder is not on Python's path."""
    program = tmp_path / "kvmux"
    program.write_text("from server.cli.main import main\n\nif __name__ == '__main__':\n    raise SystemExit(main())\n")
    wanted = (
        "of_an_author:Window:window=16,sinks=0",
        "compressed:scorer=of_an_author:Values,budget=40,recent=8,every=16",
    )
    flags = [part for name in wanted for part in ("--strategy", name)]
    folder = tmp_path / "of-an-author"
    folder.mkdir()
    (folder / "of_an_author.py").write_text(CLASSES)
    run = subprocess.run(
        [sys.executable, program, "evaluate", "--model", model_directory.resolve(), *SMALL, *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    names = [line.split("|")[1].strip() for line in run.stdout.splitlines()[2:]]
    assert names == [
        "exact_caching",
        "of_an_author-Window-window16-sinks0",
        "compressed-scorerof_an_author-Values-budget40-recent8-every16",
    ]


def test_a_name_is_not_given_twice(model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvmux.toml"
    file.write_text(f'model = "{model_directory}"\n[strategies.paged-block_size8]\nkind = "paged"\n')
    code, _, err = _run(capsys, "--config", str(file), "--strategy", "paged:block_size=8")
    assert code == 2
    assert "an instance paged-block_size8 already exists" in err


@pytest.mark.parametrize("method", ["locate", "compact"])
def test_a_strategy_that_fails_is_reported(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    file = tmp_path / "kvmux.toml"
    kind = "\n".join(f'{key} = "{value}"' for key, value in faulty(f"{method} raises").items())
    file.write_text(f'model = "{model_directory}"\n[strategies.mine]\n{kind}\n')
    code, _, err = _run(capsys, "--config", str(file), *SMALL, "--strategy", "mine")
    assert code == 2
    assert err.splitlines()[-1] == f"kvmux: cache strategy 'mine' failed in {method}(): RuntimeError: planted"


def test_table_has_no_colours_when_they_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    fidelity = Fidelity(num_tokens=10, total_nll=5.0, num_agreed=9, kls=[0.0001] * 10)
    result = StrategyResult("paged", "paged", {}, True, 2048, fidelity, fidelity)
    header, rule, line = as_table(
        EvaluationReport("m", "cpu", "float32", "stories", (1, 1), 64, 8, [result])
    ).splitlines()
    assert line.split() == [
        "|",
        "paged",
        "|",
        "2",
        "KiB",
        "|",
        "1.649",
        *("|", "90.00%", "|", "0.0001", "|", "0.0001", "|", "0.0001"),
        *("|", "90.00%", "|", "0.0001"),
        "|",
        "-",
        "|",
    ]
    assert len(header) == len(rule) == len(line)


def test_settings_come_from_a_file_too(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvmux.toml"
    lossy = 'kind = "sliding_window"\nwindow = 8'
    file.write_text(f'model = "{model_directory}"\n[strategies.mine]\n{lossy}')
    monkeypatch.setenv("KVMUX_CONFIG", str(file))
    code, out, _ = _run(capsys, *SMALL, "--strategy", "mine")
    assert (code, out.count("| mine ")) == (0, 1)
    all_of_them = "\n".join(f"[strategies.{name}]\n{lossy}" for name in default_strategies())
    file.write_text(f'model = "{model_directory}"\n{all_of_them}')
    code, out, _ = _run(capsys, *SMALL, "--config", str(file), "--strategy", "paged")
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:]] == ["exact_caching", "paged"]


def test_strategies_are_named_by_their_options() -> None:
    assert parse_strategy("paged") == ("paged", {})
    assert parse_strategy("paged: block_size = 8 ") == ("paged-block_size8", {"kind": "paged", "block_size": "8"})
    assert parse_strategy("mine:share=0.5,limit=50%")[0] == "mine-share0-5-limit50-"
    assert parse_strategy("a.b:Cache") == ("a-b-Cache", {"kind": "a.b:Cache"})
    name, options = parse_strategy("a.b:Cache:window=64,scorer=c:Scorer")
    assert name == "a-b-Cache-window64-scorerc-Scorer"
    assert options == {"kind": "a.b:Cache", "window": "64", "scorer": "c:Scorer"}
    name, options = parse_strategy("sliding_window:window=64,sinks=0")
    assert name == "sliding_window-window64-sinks0"
    assert options == {"kind": "sliding_window", "window": "64", "sinks": "0"}


def test_a_dot_leads_into_an_option_that_is_a_table() -> None:
    name, options = parse_strategy("compressed:scorer=random,scorer_options.per_head=false,scorer_options.seed=7")
    assert name == "compressed-scorerrandom-scorer_options-per_headfalse-scorer_options-seed7"
    assert options == {
        "kind": "compressed",
        "scorer": "random",
        "scorer_options": {"per_head": "false", "seed": "7"},
    }
    assert parse_strategy("mine:a.b.c=1,a.d=2")[1] == {"kind": "mine", "a": {"b": {"c": "1"}, "d": "2"}}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("a=1,a.b=2", "'a.b': 'a' has a value, too"),
        ("a.b=1,a=2", "'a' has options, too"),
        ("a.b.c=1,a.b=2", "'a.b' has options, too"),
        ("a.b=1,a.b.c=2", "'a.b.c': 'b' has a value, too"),
        (".a=1", "'.a' has a dot without a name"),
        ("a..b=1", "'a..b' has a dot without a name"),
    ],
)
def test_dots_without_a_meaning_are_errors(options: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"--strategy 'mine:{re.escape(options)}': {re.escape(problem)}"):
        parse_strategy(f"mine:{options}")


def test_options_of_a_scorer_reach_it(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(model_directory), *SMALL, "--strategy"]
    strategy = "compressed:budget=40,every=32,scorer=random,scorer_options."
    code, out, _ = _run(capsys, *arguments, strategy + "per_head=false")
    assert (code, out.count("| compressed-budget40-every32-scorerrandom-scorer_options-per_headfalse ")) == (0, 1)
    for wrong in ("per_head=7", "per_hat=1"):
        code, _, err = _run(capsys, *arguments, strategy + wrong)
        assert code == 2
        assert f"scorer_options.{wrong.partition('=')[0]}" in err

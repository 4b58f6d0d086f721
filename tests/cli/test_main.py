"""The command line without a model: help, flags, and errors that are one line and say what to change."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.flags import flag_name
from config.settings import Settings, group_settings
from config.sources import env_name
from server import listening
from server.cli import main as cli
from server.cli.banner import format_banner
from tests.processes.fake_children import READY

FLAGS = [name for names in group_settings().values() for name in names]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return a list that gets the settings with which `kvmux serve` would have started."""
    seen: list[Settings] = []

    class NoSupervisor:
        def __init__(self, settings: Settings, *_: Any, **__: Any) -> None:
            seen.append(settings)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(cli, "Supervisor", NoSupervisor)
    monkeypatch.setattr(cli, "resolve_model_settings", lambda settings: settings)  # there need be no model
    monkeypatch.setattr(cli, "configure_logging", lambda settings: None)
    monkeypatch.setattr("multiprocessing.current_process", lambda: type("Process", (), {})())
    monkeypatch.setenv("KVMUX_PORT", "0")
    return seen


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the single line that a wrong command line prints."""
    try:
        code = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- help
def test_help_names_every_setting_with_its_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(capsys, "serve").split())
    for name in FLAGS:
        field = Settings.model_fields[name]
        assert f"{flag_name(name)} " in text.replace(",", " ")
        assert f"[{env_name(name)}]" in text
        assert field.description, f"{name} has no description"
        assert " ".join(field.description.split()) in text
        if field.default is not None:
            assert f"default: {field.default}) [{env_name(name)}]" in text


def test_help_explains_strategies_by_an_example_that_loads(
    capsys: pytest.CaptureFixture[str], served: list[Settings], tmp_path: Path
) -> None:
    lines = help_of(capsys, "serve").splitlines()
    start = next(i for i, line in enumerate(lines) if "# kvmux.toml" in line)
    end = next(i for i, line in enumerate(lines) if line.startswith("A client names"))
    file = tmp_path / "kvmux.toml"
    file.write_text("\n".join(lines[start:end]))
    assert cli.main(["serve", "--config", str(file)]) == 0
    assert served[0].strategies["short"].options == {"window": 256}
    assert served[0].rules[0].use == "short"


def test_every_setting_is_in_one_group_or_a_table() -> None:
    assert sorted([*FLAGS, "strategies", "rules", "rollouts", "key_limits"]) == sorted(Settings.model_fields)


def test_help_of_the_program_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "serve" in help_of(capsys)
    assert cli.main([]) == 2
    assert "serve" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kvmux {importlib.metadata.version('kvmux')}\n"


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = """if True:
        import sys
        from server.cli.main import main
        try:
            main(["serve", "--help"])
        except SystemExit:
            heavy = {"torch", "transformers", "numpy", "fastapi", "uvicorn"} & set(sys.modules)
            sys.exit(" ".join(heavy) or 0)
    """
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_python_m_server_is_kvmux() -> None:
    printed = subprocess.run([sys.executable, "-m", "server", "--version"], check=True, capture_output=True, text=True)
    assert printed.stdout.startswith("kvmux ")


# ---------------------------------------------------------------- flags
def test_flags_beat_environment_beats_file(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kvmux.toml"
    file.write_text('model = "of-file"\nworkers = 2\nmax_num_seqs = 3\n')
    monkeypatch.setenv("KVMUX_WORKERS", "4")
    monkeypatch.setenv("KVMUX_MAX_NUM_SEQS", "5")
    assert cli.main(["serve", "--config", str(file), "--max-num-seqs", "6", "--dtype=float16"]) == 0
    settings = served[0]
    assert (settings.model, settings.workers, settings.max_num_seqs, settings.dtype) == ("of-file", 4, 6, "float16")


def test_the_file_is_named_by_the_environment_unless_a_flag_names_one(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f'model = "{name}"')
    monkeypatch.setenv("KVMUX_CONFIG", str(tmp_path / "one"))
    assert cli.main(["serve"]) == 0
    assert cli.main(["serve", "--config", str(tmp_path / "two")]) == 0
    assert [settings.model for settings in served] == ["one", "two"]


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "invalid choice: 'serv'"),
        (["serve", "--prot", "1"], "--prot is not an option; did you mean --port?"),
        (["serve", "--max_seq_len=9"], "did you mean --max-seq-len?"),
        (["serve", "a.gguf", "extra"], "extra is not an option"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "a.gguf", "--model", "b.gguf"], "two models are given, a.gguf and --model b.gguf"),
        (["serve", "--port", "80x"], "port (from --port): should be a whole number"),
        (["serve", "--device", "gpu"], "device (from --device): should be 'auto', 'cpu', 'mps', 'cuda', 'metal-"),
        (["serve", "--kv-memory", "2 fish"], "kv_memory (from --kv-memory): '2 fish' is not an amount of memory"),
        (["serve", "--default-strategy", "paged2"], "default_strategy: there is no instance 'paged2'; instances are"),
        (["serve", "--config", "missing.toml"], "cannot read the settings file missing.toml: No such file"),
        (["serve", "--host", "no.such.host.invalid"], "no such address; see --host"),
        (["serve", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1, port 8000"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in error_of(capsys, *arguments)


def test_the_model_needs_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "no/such.gguf"]) == 2
    assert "cannot read no/such.gguf" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = error_of(capsys, "serve", "--port", str(port))
    assert f"port {port}: the port is in use" in message
    assert f"--port {port % 65535 + 1}" in message


def test_anothers_package_kernels_is_noticed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    cli.check_kernels_package()
    assert caplog.text == ""

    installed = tmp_path / "kernels-0.19.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.19.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    cli.check_kernels_package()
    assert "pip uninstall kernels" in caplog.text

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    assert "pip uninstall kernels" in error_of(capsys, "serve", "--port", "0")


def test_short_api_keys_are_warned_of_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    cli.check_api_keys(Settings(api_keys=["long-enough"]))
    assert caplog.text == ""
    cli.check_api_keys(Settings(api_keys=["tgi", "long-enough", "x7"]))
    assert "fewer than 8 characters may be guessed: number 1, 3" in caplog.text
    assert "tgi" not in caplog.text


# ---------------------------------------------------------------- addresses and what is printed
def test_urls() -> None:
    for host, url in (
        ("127.0.0.1", "http://127.0.0.1:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        ("localhost", "http://127"),
    ):
        with listening.listen(host, 0) as listener:
            assert listening.get_url(listener).startswith(url)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_urls() -> None:
    try:
        listener = listening.listen("::1", 0)
    except listening.ListenError:
        pytest.skip("no IPv6 here")
    with listener:
        assert listening.get_url(listener).startswith("http://[::1]:")


def test_welcome_says_when_all_addresses_are_served() -> None:
    assert "on every address" in format_banner("http://127.0.0.1:8000", Settings(host="0.0.0.0"), READY)
    assert "on every address" not in format_banner("http://127.0.0.1:8000", Settings(), READY)


def test_a_model_with_states_says_how_large_they_are_and_whether_many_find_room() -> None:
    settings, states = Settings(max_num_seqs=4), READY | {"state_bytes": 1 << 20}
    text = format_banner("http://127.0.0.1:8000", settings, states | {"kv_memory_bytes": 100 << 20})
    assert "\n  states      1.0 MiB each, two of a running text; the KV memory has room for 100\n" in text
    text = format_banner("http://127.0.0.1:8000", settings, states | {"kv_memory_bytes": 10 << 20})
    assert "room for 10; few checkpoints find room: raise --kv-memory or lower --max-num-seqs\n" in text
    assert "states  " not in format_banner("http://127.0.0.1:8000", settings, READY)


def test_the_first_request_is_a_chat_if_the_model_has_a_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    for model, path in ((str(tmp_path), "/v1/chat/completions"), (str(tmp_path / "base"), "/v1/completions")):
        text = format_banner("http://127.0.0.1:8000", Settings(model=model), READY)
        (command,) = re.findall(r"curl http://127.0.0.1:8000(\S+) ", text)
        assert command == path


def test_the_curl_line_is_one_command_of_the_shell() -> None:
    text = format_banner("http://127.0.0.1:8000", Settings(), READY | {"model": "it's mine"})
    command = text[text.index("curl") :]
    words = subprocess.run(["sh", "-c", command.replace("curl", "printf '%s\n'", 1)], capture_output=True, text=True)
    assert '"model": "it\'s mine"' in words.stdout

"""Whatever the environment and the file system are like, the server starts, or prints one sentence and no traceback.

Most cases run in this process; a few start the server as a user would.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from config.errors import SettingsError
from config.settings import Settings, load_settings
from kernels.weights.quantizers import quantize_blocks
from server.cli import main as cli
from server.engine.build import build_engine
from server.engine.device import choose_weight_format
from server.models.files.directory import EMBEDDED, resolve_model_settings
from server.models.formats.weights_cache import CachedWeightsWriter
from server.processes.child_process import format_error, run_child
from server.processes.heartbeat import Heartbeat
from server.text.tokenizer import Tokenizer
from tests.cli.file_permissions import enforced_permissions
from tests.cli.startup_errors import SMALL_ENGINE, startup_error
from tests.models.gguf_files import gguf_model, write_gguf

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]


# -------------------------------------------------------------------- directories
@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Return paths at which there is no usable directory, by kind."""
    (tmp_path / "file").touch()
    for name, mode in (("read_only", 0o555), ("closed", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "loop").symlink_to("loop")
    named = {name: str(tmp_path / name) for name in ("file", "read_only", "closed", "loop", "none/at/all")}
    return named | {
        "in_file": str(tmp_path / "file" / "x"),
        "in_closed": str(tmp_path / "closed" / "x"),
        "device": "/dev/null",
        "long": f"/tmp/{'x' * 5000}",
        "unknown_user": "~nobody-here/x",
        "no_utf8": os.fsdecode(os.fsencode(tmp_path) + b"/\xff"),
    }


PLACES = ("file", "read_only", "closed", "loop", "none/at/all", "in_file", "in_closed", "device", "long")
PLACES += ("unknown_user", "no_utf8")
FINE = ("none/at/all", "no_utf8")


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_a_gguf_file_where_nothing_can_be_unpacked(
    variable: str,
    place: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, places[place])
    with enforced_permissions():
        told = startup_error(capsys, "--model", str(file))
    if place == "unknown_user":
        assert "no home directory: set HOME, or XDG_CACHE_HOME" in told
    elif place not in FINE:
        assert "cannot unpack" in told
        assert "set XDG_CACHE_HOME" in told


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", ["XDG_CACHE_HOME", "HOME", "weights_cache"])
def test_quantized_weights_where_nothing_can_be_kept(
    source: str,
    place: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    flags = {"weights": "int8"}
    if source == "weights_cache":
        flags[source] = places[place]
    else:
        monkeypatch.setenv(source, places[place])
    with enforced_permissions():
        try:
            home = choose_weight_format(load_settings(None, flags), torch.float32).cache_dir
        except SettingsError:
            assert source == "weights_cache"
            assert place in ("unknown_user", "no_utf8")
            return
        if home is not None:
            draft = CachedWeightsWriter(home / "checkpoint" / "int8-0")
            draft.put("a", quantize_blocks(torch.randn(4, 32), "Q8_0"))
            draft.publish()
            draft.close()
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (place not in FINE)


@pytest.mark.usefixtures("started")
def test_a_user_without_a_home(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a container that runs as a user id without an entry in /etc/passwd."""

    def unknown(number: int) -> NoReturn:
        raise KeyError(number)

    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert "no home directory: set HOME, or XDG_CACHE_HOME" in startup_error(capsys, "--model", str(file))
    assert startup_error(capsys) == ""
    assert choose_weight_format(load_settings(None, {"weights": "int8"}), torch.float32).cache_dir is None
    assert "cannot be cached" in caplog.text


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("place", PLACES)
def test_a_model_where_there_is_none(place: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with enforced_permissions():
        assert startup_error(capsys, "--model", places[place])
        assert startup_error(capsys, "--model", f"{places[place]}/a.gguf")


FILES_OF_A_MODEL = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "generation_config.json",
)
CHANGES: dict[str, Callable[[Path], object]] = {
    "closed": lambda file: file.chmod(0),
    "directory": lambda file: (file.unlink(), file.mkdir()),
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


def first_refusal(model: Path) -> str:
    """Load a model as the processes do, in their order; return the first error as `run_child` logs it."""
    try:
        resolve_model_settings(load_settings(None, {"model": str(model)}))
        Tokenizer.from_directory(model)
        build_engine(load_settings(None, SMALL_ENGINE | {"model": str(model)}))
    except (SettingsError, OSError) as error:
        return format_error(error)
    return ""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*FILES_OF_A_MODEL, ".", "chat_template.jinja", "additional_chat_templates/a.jinja"])
def test_a_models_files_that_cannot_be_read(name: str, change: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for file in FILES_OF_A_MODEL:
        (model / file).write_bytes((EMBEDDED["tiny"] / file).read_bytes())
    for file in ("chat_template.jinja", "additional_chat_templates/a.jinja"):
        (model / file).write_text("{{ messages }}")
    if name != ".":
        CHANGES[change](model / name)
    else:
        model.chmod({"closed": 0, "directory": 0o444}.get(change, 0o111))
    with enforced_permissions():
        told = first_refusal(model)
    assert "\n" not in told
    assert told == "" or str(tmp_path) in told
    model.chmod(0o755)


# -------------------------------------------------------------------- full disks
def full(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    "step", ["pathlib.Path.write_text", "pathlib.Path.mkdir", "tempfile.mkdtemp", "pathlib.Path.rename"]
)
def test_no_room_to_unpack_a_gguf_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(gguf_model("llama"), tmp_path / "a.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(step, full)
        assert "No space left on device; set XDG_CACHE_HOME" in startup_error(capsys, "--model", str(file))
    assert list((tmp_path / "cache").rglob("*.json")) == []
    assert startup_error(capsys, "--model", str(file)) == "", "once there is room"


def test_no_room_for_the_engines_socket(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "configure_logging", lambda settings: None)
    monkeypatch.setattr("multiprocessing.current_process", lambda: type("Process", (), {})())
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert "No space left on device (/some/file)" in startup_error(capsys, "--port", "0")


def failing(settings: Settings, socket_path: str) -> None:
    full()


def test_a_process_of_the_server_that_the_system_refuses_something(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    heartbeat = Heartbeat(multiprocessing.get_context("spawn"))
    heartbeat.beat()  # nothing loads
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(SystemExit) as exit_:
            run_child(f"{__name__}:failing", Settings(), str(tmp_path / "engine.sock"), heartbeat)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)  # a child blocks signals, and this process is none
    assert exit_.value.code == 2
    (record,) = caplog.records
    assert record.getMessage() == "the operating system refuses to go on: No space left on device (/some/file)"


# -------------------------------------------------------------------- as a user starts it
def limited(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, most))


REFUSED: dict[str, tuple[dict[str, str], Callable[[], None] | None, str]] = {
    "few_files": ({}, limited(resource.RLIMIT_NOFILE, 16), "a process may open 16 files here"),
    "no_file": ({}, limited(resource.RLIMIT_FSIZE, 0), "the operating system refuses to go on: File too large"),
    "setting": ({"KVMUX_PORT": "\udc80"}, None, "port (from the environment, KVMUX_PORT)"),
    "host": ({"KVMUX_HOST": "a" * 70 + ".b"}, None, "no such address; see --host"),
    "model": ({"KVMUX_MODEL": "\udc80"}, None, "model (from the environment, KVMUX_MODEL): has control characters"),
    "json": ({"KVMUX_LOG_FORMAT": "json", "KVMUX_MODEL": "none/at/all"}, None, '"level": "ERROR"'),
    "worker": ({"KVMUX_MODEL": "{closed}"}, None, "tokenizer.json is not a tokenizer this server can read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_real_start_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    environment, before, words = REFUSED[name]
    environment = {key: value.format(closed=tmp_path) for key, value in environment.items()}
    for file in FILES_OF_A_MODEL:
        (tmp_path / file).write_bytes((EMBEDDED["tiny"] / file).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", *([] if "KVMUX_PORT" in environment else ["--port", "0"])],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment,
        cwd=ROOT,
        capture_output=True,
        preexec_fn=before,
        timeout=120,
    )
    told = done.stderr.decode(errors="backslashreplace")
    assert done.returncode == 2, told
    assert words in told
    assert "Traceback" not in told
    assert len(told.splitlines()) == 1 or name in ("worker", "json"), told


STREAMS = """
import os, sys
from server.cli.standard_streams import open_missing_streams, print_safely

open_missing_streams()
with open(sys.argv[1], "w") as opened:
    assert opened.fileno() > 2
    print_safely("\\udc80 \\u00e9", sys.stdout)
    print_safely("again", sys.stdout)
    print_safely("told", sys.stderr)
"""


@pytest.mark.parametrize(
    "streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", "| true"]
)
def test_streams_that_are_closed_or_full_end_nothing(streams: str, tmp_path: Path) -> None:
    full_device = Path("/dev/full").exists()
    command = f'"$0" -c "$1" "$2" {streams if full_device else streams.replace("/dev/full", "/dev/null")}'
    shell = ["bash", "-o", "pipefail", "-c", command, sys.executable, STREAMS, str(tmp_path / "file")]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr

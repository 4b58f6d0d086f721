"""`kvmux health`: the servers that it checks, what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from server import __main__
from server.cli import main as cli
from server.cli.health import check_health
from server.processes.runtime_directory import LOCK_FILE, URL_FILE, find_running_urls, runtime_directory
from tests.end_to_end.server_process import PATIENCE, eventually

READY = json.dumps({"status": "ready", "model": "tiny"})


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Run a server with this response to GET /ready and 404 to anything else; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide servers that run beside the tests."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


# ---------------------------------------------------------------- one server
def test_a_server_that_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, READY) as url:
        assert check_health(url) == check_health(f"{url}/") == 0
    assert f"{url} is ready and serves tiny\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (503, json.dumps({"error": {"message": "the engine starts"}}), "the engine starts"),
        (503, "no JSON", "HTTP 503"),
        (503, "[]", "HTTP 503"),
        (404, "<html>", "HTTP 404"),
        (200, "<html>", ""),
        (200, "[]", "not kvmux"),
        (200, json.dumps({"status": "ok"}), "not kvmux"),
    ],
)
def test_a_server_that_is_not(capsys: pytest.CaptureFixture[str], status: int, body: str, why: str) -> None:
    with answering(status, body) as url:
        assert check_health(url) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"kvmux: {url} is not ready: ")
    assert why in printed.err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert check_health(url, timeout=0.1) == 1  # takes the connection, and says nothing
    assert "timed out" in capsys.readouterr().err
    assert check_health(url) == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["8000", "localhost:8000", "file:///etc/passwd", "http://", "http://[", "http://a b"])
def test_what_is_no_url(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert check_health(url) == 1
    assert capsys.readouterr().err.startswith(f"kvmux: {url} is not ready: ")


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(200, READY) as url:
        assert check_health(url) == 0


# ---------------------------------------------------------------- those that run here
def test_without_a_server_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_health() == 1
    assert "no server of this user runs here" in capsys.readouterr().err


def test_all_that_run_here_have_to_be_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as servers:
        for _ in range(2):
            servers.enter_context(runtime_directory(servers.enter_context(answering(200, READY))))
        assert check_health() == 0
        assert capsys.readouterr().out.count("is ready") == 2
        servers.enter_context(runtime_directory(servers.enter_context(answering(503, ""))))
        assert check_health() == 1
        printed = capsys.readouterr()
        assert (printed.out.count("is ready"), printed.err.count("is not ready")) == (2, 1)
    assert find_running_urls() == []


def test_what_killed_servers_left_and_what_is_no_servers_is_not_asked(tmp_path: Path) -> None:
    left = tmp_path / "kvmux-left"
    left.mkdir()
    (left / URL_FILE).write_text("http://127.0.0.1:1")
    (left / LOCK_FILE).touch()
    (tmp_path / "kvmux-starting").mkdir()
    (tmp_path / "kvmux-file").touch()
    (tmp_path / "kvmux-link").symlink_to(left)
    with runtime_directory("http://127.0.0.1:2"):
        assert find_running_urls() == ["http://127.0.0.1:2"]


# ---------------------------------------------------------------- the command
def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, READY) as url:
        assert cli.main(["health", "--url", url, "--timeout", "30s"]) == 0
    assert url in capsys.readouterr().out
    assert cli.main(["health"]) == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "8d"])
def test_timeouts_that_are_none(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["health", f"--timeout={seconds}"])
    assert ended.value.code == 2
    assert f"argument --timeout: {seconds!r} is not a duration" in capsys.readouterr().err


def test_the_short_way_imports_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs every few seconds beside a busy server."""
    code = """if True:
        import sys
        from server.__main__ import main
        sys.argv = ["kvmux", "health"]
        assert main() == 1
        sys.exit(" ".join({"pydantic", "server.cli.main", "multiprocessing", "torch"} & set(sys.modules)) or 0)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setattr(sys, "argv", ["kvmux", "health"])
    with answering(200, READY) as url, runtime_directory(url):
        assert __main__.main() == 0


# ---------------------------------------------------------------- real servers
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def asked() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "server", "health"], capture_output=True, text=True, timeout=PATIENCE)


def test_real_servers_wherever_they_were_told_to_listen(tmp_path: Path) -> None:
    """By a flag, by a settings file that a flag names, and by one that a variable names."""
    flag, file, variable = free_port(), free_port(), free_port()
    for name, port in (("file", file), ("variable", variable)):
        (tmp_path / f"{name}.toml").write_text(f'port = {port}\nthreads = 1\nkv_memory = "64MiB"\n')
    serve = [sys.executable, "-m", "server", "serve"]
    starts = [
        ([*serve, "--port", str(flag), "--threads", "1", "--kv-memory", "64MiB"], {}),
        ([*serve, "--config", str(tmp_path / "file.toml")], {}),
        (serve, {"KVMUX_CONFIG": str(tmp_path / "variable.toml")}),
    ]
    ports = sorted([flag, file, variable])
    with ExitStack() as running, (tmp_path / "log").open("w") as log:
        servers = []
        for command, variables in starts:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
            running.callback(server.wait, PATIENCE)
            running.callback(server.terminate)
            servers.append(server)
        eventually(lambda: [url.rpartition(":")[2] for url in find_running_urls()] == [str(port) for port in ports])
        first = asked()  # while they load
        assert (first.returncode == 0) == (first.stdout.count("is ready and serves tiny") == 3)
        eventually(lambda: all(httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200 for port in ports))
        assert asked().stdout.count("is ready and serves tiny") == 3

        servers[0].send_signal(signal.SIGSTOP)  # the API processes answer still
        assert asked().returncode == 0
        servers[0].send_signal(signal.SIGCONT)
        servers[0].terminate()
        assert servers[0].wait(PATIENCE) == 0
        servers[1].kill()
        servers[1].wait(PATIENCE)
        left = asked()
        assert left.returncode == 0
        assert left.stdout == f"http://127.0.0.1:{variable} is ready and serves tiny\n"
        servers[2].terminate()
        assert servers[2].wait(PATIENCE) == 0
        assert asked().returncode == 1

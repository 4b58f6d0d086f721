"""The API process as the supervisor starts it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.process
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from config.errors import SettingsError
from config.settings import Settings
from server.api.worker import serve_worker
from server.engine.ipc.messages import Cancel, Submit, Tokens
from server.processes.child_process import request_stop
from tests.api.fake_engine import FakeEngine, Script, generates
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of
from tests.patience import PATIENCE
from tests.text.tiny_tokenizers import byte_level


def test_an_api_process_imports_neither_torch_nor_transformers_nor_what_is_switched_off() -> None:
    program = "import sys, server.api.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "numpy", "kernels", "cache_strategies", "safetensors", "huggingface_hub"}
    loaded = set(done.stdout.split())
    assert heavy.isdisjoint(name.split(".")[0] for name in loaded)
    assert "opentelemetry.sdk" not in loaded, "FastAPI loads the API, which does nothing"


def test_it_may_have_more_connections_than_systems_allow_by_default() -> None:
    program = """
import resource
from server.api.worker import MAX_OPEN_FILES, allow_many_connections
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
hard = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
allow_many_connections()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@dataclass
class Worker:
    """A running API process, and the engine it talks to."""

    url: str
    process: multiprocessing.process.BaseProcess
    engine: FakeEngine

    def terminate(self) -> None:
        """Asks it to end, and waits until it listens no more."""
        request_stop(self.process)
        with contextlib.suppress(httpx.TransportError):
            while httpx.get(f"{self.url}/health", timeout=PATIENCE):
                pass


@contextlib.contextmanager
def worker(tmp_path: Path, socket_path: Path, script: Script, **settings: float) -> Iterator[Worker]:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = multiprocessing.get_context("spawn").Process(
        target=serve_worker, args=(Settings(model=str(tmp_path), **settings), socket_path, listener)
    )
    with FakeEngine(socket_path, script) as engine:
        process.start()
        listener.close()
        try:
            while httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 503:
                time.sleep(0.01)
            yield Worker(url, process, engine)
            process.join(PATIENCE)
            assert process.exitcode == 0
        finally:
            process.kill()


def test_it_lets_running_requests_end(tmp_path: Path, socket_path: Path, encode: Encode) -> None:
    with (
        worker(tmp_path, socket_path, generates(encode("hello"), None)) as running,
        httpx.stream(
            "POST", f"{running.url}/v1/completions", json=VALID_REQUEST | {"stream": True}, timeout=PATIENCE
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        running.terminate()
        (submit,) = running.engine.all(Submit)
        running.engine.send(Tokens(submit.request_id, encode(" world"), "length"))
        *_, last, _, done, _ = lines
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"


def test_requests_that_outlast_the_drain_end_with_an_error(tmp_path: Path, socket_path: Path, encode: Encode) -> None:
    """Everything that the engine sent until then arrives, and then the reason."""
    with (
        worker(tmp_path, socket_path, generates(encode("hello"), None), drain_seconds=3) as running,
        ThreadPoolExecutor() as pool,
        httpx.stream(
            "POST", f"{running.url}/v1/completions", json=VALID_REQUEST | {"stream": True}, timeout=PATIENCE
        ) as stream,
    ):
        plain = pool.submit(httpx.post, f"{running.url}/v1/completions", json=VALID_REQUEST, timeout=PATIENCE)
        submits = running.engine.wait_for(Submit, 2)
        running.terminate()
        for submit in submits:
            running.engine.send(Tokens(submit.request_id, encode(" world"), None))
        stream.read()
        *found, error = chunks_of(stream)
        assert "".join(chunk["choices"][0]["text"] for chunk in found) == "hello world"
        refused = plain.result()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        for reason in (error, refused.json()):
            assert reason["error"]["code"] == "server_stopping"
        running.engine.wait_for(Cancel, 2)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SettingsError, match="is it the directory"):
        serve_worker(Settings(model=str(tmp_path)), "unused", listener)

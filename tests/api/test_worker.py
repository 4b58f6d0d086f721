"""The API process as the supervisor starts it."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from config.settings import Settings, SettingsError
from server.api.worker import serve_worker
from server.engine.messages import Submit, Tokens
from tests.api.fake_engine import FakeEngine, says
from tests.text.tiny import byte_level

Words = Callable[[str], list[int]]


def test_an_api_process_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, server.api.worker; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "numpy", "kernels", "cache_strategies", "safetensors", "huggingface_hub"}
    assert heavy.isdisjoint(done.stdout.split())


def test_sigterm_lets_running_requests_end(tmp_path: Path, socket_path: Path, words: Words) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = multiprocessing.get_context("spawn").Process(
        target=serve_worker, args=(Settings(model=str(tmp_path)), socket_path, listener)
    )
    with FakeEngine(socket_path, says(words("hello"), None)) as engine, httpx.Client(base_url=url, timeout=20) as http:
        process.start()
        listener.close()
        while http.get("/ready").status_code == 503:
            time.sleep(0.01)
        with http.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.terminate()
            with contextlib.suppress(httpx.ConnectError):
                while httpx.get(f"{url}/health", timeout=1):  # until it listens no more
                    pass
            (submit,) = engine.all(Submit)
            engine.send(Tokens(submit.request_id, words(" world"), "length"))
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        process.join(10)
    assert process.exitcode == 0


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SettingsError, match="is it the directory"):
        serve_worker(Settings(model=str(tmp_path)), "unused", listener)

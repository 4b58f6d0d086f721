"""`python -m tools.trace_request`: lists the files that a request's body passes, and those that a token passes back.

One server runs in this process: an API worker, the engine, and the Unix socket between them, each in its thread, with
default settings and the embedded model. The process that tokenizes is a thread here, too, so that its calls are seen.
Completions run again and again, and the calls of Python functions of the product are noted.

A body's way begins with the first bytes of its request and ends with `Scheduler.submit`. A token's way begins when
`ModelRunner.execute` returns it: only then is it known that it was drawn and not rejected. It ends when its text is
given to uvicorn. A thread is on the way from the moment that it is handed the body, or the token, until it hands it on.

A function counts if it is called on that way in each of several requests. So what also runs in the background, such as
heartbeats, does not count. Neither do imports, and what only a starting server does: the first requests are not traced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import httpx

from config.settings import Settings, load_settings
from server.api.worker import ApiServer, make_tokenizer
from server.engine.ipc.socket_client import SocketClient
from server.models.files.directory import resolve_model_settings
from server.processes import engine
from server.processes.child_process import STOP_SIGNAL
from server.text.processes import sandbox_process, text_process
from tools.server_process import is_ready

ROOT = Path(__file__).parents[1]
PRODUCT = ("cache_strategies", "config", "kernels", "server")  # folders whose files count
SETTINGS = {"model": "tiny", "kv_memory": "64MiB"}
BODY = {"prompt": "Once upon a time there was a", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
WARM_UP_REQUESTS = 3
ROUNDS = 4  # traced requests of each kind
TOKENS = range(4, 12)  # of the streamed tokens, those that are followed: neither the first nor the last
PAUSE = 0.05  # seconds in which a request ends in all threads, once its response was read
TIMEOUT = 60.0  # seconds for the server to start, and for a request
UVICORN_SEND = "RequestResponseCycle.send"

Way = dict[str, list[str]]  # the functions that are called of each file, both in order of the first call


def main() -> None:
    argparse.ArgumentParser(
        "python -m tools.trace_request", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, way in trace_requests().items():
        print(f"{name.replace('_', ' ')}: {len(way)} files")
        for number, (file, functions) in enumerate(way.items(), 1):
            print(f"{number:4}. {file}: {', '.join(functions)}")


# ---------------------------------------------------------------- the server and its requests
def trace_requests() -> dict[str, Way]:
    """Run a server in this process, and return the ways of its requests. Call it once, in the main thread."""
    settings, recorder = resolve_model_settings(load_settings(None, SETTINGS)), Recorder()
    threading.setprofile(recorder.on_event)  # of threads that start from now on
    sys.setprofile(recorder.on_event)
    with tempfile.TemporaryDirectory(prefix="kvmux-") as directory, ThreadPoolExecutor() as pool:
        path, reports = f"{directory}/engine.sock", SimpleQueue[Any]()
        status = SimpleNamespace(calls=None, disabled={}, has_rollouts=False, send=reports.put, beat=lambda *_: None)
        client = pool.submit(run_worker, settings, path, reports, recorder)
        engine.run(settings, path, status)  # type: ignore[arg-type]  # until the client has finished
        sys.setprofile(None)
        return client.result()


def run_worker(settings: Settings, socket_path: str, reports: SimpleQueue[Any], recorder: Recorder) -> dict[str, Way]:
    """Run an API worker once the engine is ready, send it requests, and end worker and engine."""
    report = reports.get(timeout=TIMEOUT)
    assert "error" not in report, report
    limits = dict.fromkeys(("redirect_stderr", "limit_memory", "limit_resources", "limit_cpu_time"), mock.DEFAULT)
    with (
        mock.patch.object(text_process, "_start_program", start_text_thread),
        mock.patch.multiple(sandbox_process, **limits),  # they would hold for this process
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        worker = ApiServer(settings, SocketClient(socket_path), make_tokenizer(settings))
        thread = threading.Thread(target=worker.run, kwargs={"sockets": [listener]}, name="worker")
        thread.start()
        try:
            return send_requests(f"http://127.0.0.1:{listener.getsockname()[1]}", recorder)
        finally:
            worker.should_exit = True
            thread.join()
            os.kill(os.getpid(), STOP_SIGNAL)  # the engine returns


def send_requests(url: str, recorder: Recorder) -> dict[str, Way]:
    deadline = time.monotonic() + TIMEOUT
    while not is_ready(url):
        assert time.monotonic() < deadline, "the server is not ready"
        time.sleep(PAUSE)
    with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False) as http:

        def complete(stream: bool) -> None:
            http.post("/v1/completions", json=BODY | {"stream": stream}).raise_for_status()

        for stream in (True, False) * WARM_UP_REQUESTS:
            complete(stream)
        streamed = [recorder.record(lambda: complete(True)) for _ in range(ROUNDS)]
        whole = [recorder.record(lambda: complete(False)) for _ in range(ROUNDS)]
    return {
        "body": intersect([find_body_way(calls) for calls in (*streamed, *whole)]),
        "step": intersect([find_step_way(calls, number) for calls in streamed for number in TOKENS]),
        "streamed_token": intersect(
            [max((find_token_way(calls, number) for number in TOKENS), key=len) for calls in streamed]
        ),
        "last_token_of_a_whole_response": intersect([find_token_way(calls, -1) for calls in whole]),
    }


def start_text_thread(connection: socket.socket, _role: str) -> SimpleNamespace:
    """Run the program that tokenizes in a thread; return what `TextProcess` uses of a `subprocess.Popen`."""
    ours = connection.dup()
    threading.Thread(target=sandbox_process.serve, args=[ours], name="text", daemon=True).start()

    def kill() -> None:
        with contextlib.suppress(OSError):  # it has ended
            ours.shutdown(socket.SHUT_RDWR)

    return SimpleNamespace(pid=os.getpid(), poll=lambda: None, kill=kill, wait=lambda _=None: -signal.SIGKILL)


# ---------------------------------------------------------------- what is called
class Call(NamedTuple):
    """A function that is called, or returns, in a thread."""

    kind: str  # "call" or "return"
    thread: int
    file: str  # relative to the repository; empty for other files
    function: str


class Recorder:
    """Notes calls of the product's functions in all threads while a function runs."""

    def __init__(self) -> None:
        self._calls: list[Call] | None = None

    def record(self, run: Callable[[], object]) -> list[Call]:
        time.sleep(PAUSE)
        calls: list[Call] = []
        self._calls = calls
        run()
        time.sleep(PAUSE)
        self._calls = None
        return calls

    def on_event(self, frame: FrameType, event: str, _: Any) -> None:
        """Note an event of `sys.setprofile`."""
        if (calls := self._calls) is None or event not in ("call", "return"):
            return
        if (file := find_file(frame.f_code)) is not None:
            calls.append(Call(event, threading.get_ident(), file, frame.f_code.co_qualname))


@cache
def find_file(code: CodeType) -> str | None:
    """Return the path of a function's file, if it is the product's; empty for a function that ends a way."""
    path = Path(code.co_filename)
    if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
        is_function = not code.co_name.startswith("<") or code.co_name == "<lambda>"  # not a module or comprehension
        return str(path.relative_to(ROOT)) if is_function else None
    return "" if code.co_qualname == UVICORN_SEND else None


# ---------------------------------------------------------------- the ways
def find_body_way(calls: Sequence[Call]) -> Way:
    """Return the files from the request's first bytes to the scheduler."""
    begin = find(calls, "call", "BoundedConnection.data_received")
    end = find(calls, "call", "Scheduler.submit", begin)
    spans = {  # of the worker, of the socket's end in the engine, and of the engine; the tokenizer's is the whole
        calls[begin].thread: (begin, find(calls, "return", "SocketClient._submit", begin)),
        calls[served := find(calls, "call", "EngineServer._serve_worker", begin)].thread: (served, end),
        calls[end].thread: (find(calls, "call", "Loop._handle", begin), end),
    }

    def is_on_way(index: int, call: Call) -> bool:
        first, last = spans.get(call.thread, (begin, end))
        return first <= index <= last

    return collect(call for index, call in enumerate(calls) if is_on_way(index, call))


def find_step_way(calls: Sequence[Call], number: int) -> Way:
    """Return the files of the step that samples the token of that number."""
    sampled = find_all(calls, "return", "ModelRunner.execute")[number]
    began = max(index for index in find_all(calls, "call", "Core.step") if index < sampled)
    return collect(call for call in calls[began:sampled] if call.thread == calls[sampled].thread)


def find_token_way(calls: Sequence[Call], number: int) -> Way:
    """Return the files from the model runner to the socket for the token of that number; -1: for the last one.

    Of a stream, some files may be missing: if the worker is slower than the engine, the next bytes that it sends are
    those of an earlier token.
    """
    drawn = find_all(calls, "return", "ModelRunner.execute")[number]
    sent = find(calls, "return", "EngineServer.send", drawn)
    received = find(calls, "call", "_Connection.data_received", drawn)
    written = find(calls, "call", UVICORN_SEND, received)
    on_engine = [call for call in calls[drawn : sent + 1] if call.thread == calls[drawn].thread]
    on_worker = [call for call in calls[received:written] if call.thread == calls[written].thread]
    return collect([on_engine[0]._replace(kind="call"), *on_engine, *on_worker])


def find_all(calls: Sequence[Call], kind: str, function: str) -> list[int]:
    """Return the indices of the calls of a function, or of the returns from it, as `kind` says."""
    return [i for i, call in enumerate(calls) if (call.kind, call.function) == (kind, function)]


def find(calls: Sequence[Call], kind: str, function: str, start: int = 0) -> int:
    """Return the index of the first of these from `start` on. Raises LookupError if there is none."""
    if found := [index for index in find_all(calls, kind, function) if index >= start]:
        return found[0]
    raise LookupError(f"{function} was not called: has it another name now? Change tools/trace_request.py")


def collect(calls: Iterable[Call]) -> Way:
    """Return the functions that are called, by file."""
    found: Way = {}
    for call in calls:
        if call.kind == "call" and call.file and call.function not in found.setdefault(call.file, []):
            found[call.file].append(call.function)
    return found


def intersect(ways: Sequence[Way]) -> Way:
    """Return the functions that all ways have in common, in the order of the first one."""
    common = {
        file: [name for name in functions if all(name in way.get(file, ()) for way in ways)]
        for file, functions in ways[0].items()
    }
    return {file: functions for file, functions in common.items() if functions}


if __name__ == "__main__":
    main()

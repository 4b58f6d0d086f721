"""`python -m tools.trace_request`: lists the files that a request's body passes, and those that a token passes back.

One server runs in this process: an API worker, the engine, and the Unix socket between them, each in its thread, with
default settings and the embedded model. The process that tokenizes is a thread here, too, so that its calls are seen.
Completions run again and again, and the calls of Python functions of the product are noted.

A body's way begins with the first bytes of its request (`BoundedConnection.data_received`) and ends with
`Scheduler.submit`. A token's way begins when `ModelRunner.execute` returns it: only then is it known that it was drawn
and not rejected. It ends when the bytes with its text are given to uvicorn. A thread is on the way from the moment that
it is handed the body, or the token, until it hands it on.

A file counts if one of its functions is called on that way in each of several requests. So what also runs in the
background, such as heartbeats, does not count. Neither do imports, what only a starting server does (the first requests
are not traced), and classes that only declare fields.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar, Literal, NamedTuple
from unittest import mock

from config.settings import Settings, load_settings
from server.api.worker import ApiServer, make_tokenizer
from server.engine.ipc.messages import Submit
from server.engine.ipc.socket_client import SocketClient
from server.models.files.directory import resolve_model_settings
from server.processes import engine
from server.processes.child_process import STOP_SIGNAL
from server.text.processes import sandbox_process, text_process

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


class Ways(NamedTuple):
    """The files on each way, with the functions called, in order of the first call."""

    body: Way
    step: Way  # a decode step of one request
    streamed_token: Way
    last_token: Way  # of a response that is not streamed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace_request", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lists")
    options = parser.parse_args(arguments)
    ways = trace_requests()
    if options.json:
        print(json.dumps(ways._asdict(), indent=2))
        return
    print_way("a request's body, from the socket to the scheduler", ways.body)
    print_way("a token's step, from the scheduler to the tokens that are sampled", ways.step)
    print_way("a streamed token, from the model runner to the socket", ways.streamed_token)
    print_way("the last token of a response that is not streamed, from the model runner to the socket", ways.last_token)


def print_way(title: str, way: Way) -> None:
    print(f"{title}: {len(way)} files")
    for number, (file, functions) in enumerate(way.items(), 1):
        print(f"{number:4}. {file}: {', '.join(functions)}")


# ---------------------------------------------------------------- the server and its requests
def trace_requests() -> Ways:
    """Run a server in this process and trace its requests. Call it once, in the main thread."""
    settings = resolve_model_settings(load_settings(None, SETTINGS))
    recorder = Recorder()
    threading.setprofile(recorder.on_event)  # of threads that start from now on
    sys.setprofile(recorder.on_event)
    with tempfile.TemporaryDirectory(prefix="kvmux-") as directory:
        found: list[Ways] = []
        client = Client(settings, f"{directory}/engine.sock", recorder, found)
        client.start()
        engine.run(settings, client.socket_path, client)  # type: ignore[arg-type]  # until the client has finished
        client.join()
    sys.setprofile(None)
    if not found:
        sys.exit("no request was traced: see the exception above")
    return found[0]


class Client(threading.Thread):
    """Runs an API worker, sends it requests, and ends worker and engine. It is also what the engine reports to."""

    calls = None  # as an engine's status has
    disabled: ClassVar[Mapping[str, str]] = {}

    def __init__(self, settings: Settings, socket_path: str, recorder: Recorder, found: list[Ways]) -> None:
        super().__init__(name="client")
        self.socket_path = socket_path
        self._settings = settings
        self._recorder = recorder
        self._found = found
        self._engine_ready = threading.Event()

    def send(self, message: Mapping[str, str]) -> None:
        assert "error" not in message, message["error"]
        self._engine_ready.set()

    def beat(self) -> None:
        return None

    def run(self) -> None:
        assert self._engine_ready.wait(TIMEOUT), "the engine does not start"
        try:
            with mock.patch.object(text_process, "_start_program", TextThread):
                self._run_worker()
        finally:
            os.kill(os.getpid(), STOP_SIGNAL)  # the engine returns

    def _run_worker(self) -> None:
        settings = self._settings
        worker = ApiServer(settings, SocketClient(self.socket_path), make_tokenizer(settings))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=worker.run, kwargs={"sockets": [listener]}, name="worker")
            thread.start()
            try:
                self._found.append(self._trace(listener.getsockname()[1]))
            finally:
                worker.should_exit = True
                thread.join()

    def _trace(self, port: int) -> Ways:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        deadline = time.monotonic() + TIMEOUT
        while request(connection, "GET", "/ready") != 200:
            assert time.monotonic() < deadline, "the server is not ready"
            time.sleep(0.05)
        for stream in (True, False) * WARM_UP_REQUESTS:
            complete(connection, stream=stream)
        streamed = [self._record(connection, stream=True) for _ in range(ROUNDS)]
        whole = [self._record(connection, stream=False) for _ in range(ROUNDS)]
        connection.close()
        return Ways(
            intersect([find_body_way(calls) for calls in (*streamed, *whole)]),
            intersect([find_step_way(calls, number) for calls in streamed for number in TOKENS]),
            intersect([max((find_token_way(calls, number) for number in TOKENS), key=len) for calls in streamed]),
            intersect([find_token_way(calls, -1) for calls in whole]),
        )

    def _record(self, connection: http.client.HTTPConnection, *, stream: bool) -> list[Call]:
        time.sleep(PAUSE)
        self._recorder.begin()
        complete(connection, stream=stream)
        time.sleep(PAUSE)
        return self._recorder.end()


def complete(connection: http.client.HTTPConnection, *, stream: bool) -> None:
    status = request(connection, "POST", "/v1/completions", json.dumps(BODY | {"stream": stream}))
    assert status == 200, f"a completion ended with status {status}"


def request(connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None) -> int:
    """Send a request, read the whole response, and return its status."""
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


class TextThread:
    """The process that tokenizes, as a thread: `subprocess.Popen` as far as `TextProcess` uses it.

    It runs the program's own loop over the same socket, but sets no limits, as they would hold for this process.
    """

    def __init__(self, connection: socket.socket, _role: str) -> None:
        self.pid = os.getpid()
        self._connection = connection.dup()
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        names = ("redirect_stderr", "limit_memory", "limit_resources", "limit_cpu_time")
        with mock.patch.multiple(sandbox_process, **dict.fromkeys(names, mock.DEFAULT)), self._connection:
            sandbox_process.serve(self._connection)

    def kill(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return -signal.SIGKILL


# ---------------------------------------------------------------- what is called
class Call(NamedTuple):
    """A function that is called, or returns, in a thread."""

    kind: Literal["call", "return"]
    thread: int
    file: str  # relative to the repository; empty for files of others
    function: str
    hint: str  # what is known of its arguments, where find_body_way or find_token_way need it


class Recorder:
    """Notes calls of the product's functions in all threads, between `begin` and `end`."""

    def __init__(self) -> None:
        self._active = False
        self._calls: list[Call] = []
        self._files: dict[CodeType, str | None] = {}  # None: neither of the product nor a mark

    def begin(self) -> None:
        self._calls = []
        self._active = True

    def end(self) -> list[Call]:
        self._active = False
        return self._calls

    def on_event(self, frame: FrameType, event: str, _: Any) -> None:
        """Note an event of `sys.setprofile`."""
        if not self._active or event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._files:
            self._files[code] = find_file(code)
        file = self._files[code]
        if file is None:
            return
        kind: Literal["call", "return"] = "call" if event == "call" else "return"
        self._calls.append(Call(kind, threading.get_ident(), file, code.co_qualname, find_hint(frame)))


def find_file(code: CodeType) -> str | None:
    """Return the path of a function's file, if it is the product's; empty for a function that ends a way."""
    path = Path(code.co_filename)
    if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
        named = not code.co_name.startswith("<") or code.co_name == "<lambda>"  # no modules and no comprehensions
        return str(path.relative_to(ROOT)) if named else None
    return "" if code.co_qualname == UVICORN_SEND else None


def find_hint(frame: FrameType) -> str:
    """Return the kind of message that a function was given."""
    match frame.f_code.co_qualname:
        case "RequestResponseCycle.send":
            return "text" if frame.f_locals["message"].get("body") else ""
        case "SocketClient._send":
            return "submit" if any(isinstance(each, Submit) for each in frame.f_locals["messages"]) else ""
    return ""


# ---------------------------------------------------------------- the ways
def find_body_way(calls: Sequence[Call]) -> Way:
    """Return the files from the request's first bytes to the scheduler."""
    worker_begin = find(calls, "call", "BoundedConnection.data_received")
    worker = calls[worker_begin].thread
    worker_end = find(calls, "return", "SocketClient._send", worker_begin, hint="submit")
    engine_end = find(calls, "call", "Scheduler.submit", worker_begin)
    engine_thread = calls[engine_end].thread
    engine_begin = find(calls, "call", "Loop._handle", worker_begin)
    server = calls[find(calls, "call", "EngineServer._serve_worker", worker_begin)].thread

    def is_on_way(index: int, call: Call) -> bool:
        if call.thread == worker:
            return index <= worker_end
        if call.thread == engine_thread:
            return index >= engine_begin
        return call.thread != server or index >= worker_begin

    return collect(
        call
        for index, call in enumerate(calls[: engine_end + 1])
        if index >= worker_begin and call.file and is_on_way(index, call)
    )


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
    on_engine = [call for call in calls[drawn : sent + 1] if call.thread == calls[drawn].thread]
    received = [i for i in find_all(calls, "call", "_Connection.data_received") if i > drawn]
    written = find(calls, "call", UVICORN_SEND, received[0], hint="text")
    on_worker = [call for call in calls[received[0] : written] if call.thread == calls[written].thread]
    return collect([on_engine[0]._replace(kind="call"), *on_engine, *on_worker])


def find_all(calls: Sequence[Call], kind: str, function: str) -> list[int]:
    """Return the indices of such calls."""
    return [i for i, call in enumerate(calls) if (call.kind, call.function) == (kind, function)]


def find(calls: Sequence[Call], kind: str, function: str, start: int = 0, *, hint: str = "") -> int:
    """Return the index of the first such call from `start` on."""
    for index in range(start, len(calls)):
        call = calls[index]
        if (call.kind, call.function) == (kind, function) and call.hint.startswith(hint):
            return index
    raise LookupError(f"{function} was not called: has it another name now? Change tools/trace_request.py")


def collect(calls: Iterator[Call] | Sequence[Call]) -> Way:
    """Return the functions that are called, by file."""
    found: Way = {}
    for call in calls:
        if call.kind == "call" and call.file and call.function not in found.setdefault(call.file, []):
            found[call.file].append(call.function)
    return found


def intersect(ways: Sequence[Way]) -> Way:
    """Return what all of them have, in the order of the first one."""
    common = {
        file: [name for name in functions if all(name in way.get(file, ()) for way in ways)]
        for file, functions in ways[0].items()
    }
    return {file: functions for file, functions in common.items() if functions}


if __name__ == "__main__":
    main()

"""The log's lines: their contents, and that logging never waits until they are written."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
from io import StringIO

from server.logs import JsonFormatter, QueuedHandler, TextFormatter, fields


def record(message: str = "hello", error: Exception | None = None, **extra: object) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("some.where", logging.INFO, "", 0, message, (), exc_info)
    vars(made).update(fields(**extra))
    return made


def raised() -> Exception:
    """Return an exception with two causes."""
    try:
        try:
            int("secret")
        except ValueError:
            raise KeyError("secret") from ZeroDivisionError("secret")
    except KeyError as error:
        return error


def test_json_is_one_line_whatever_the_message() -> None:
    said = 'two\nlines, "quotes", \udc80 and ü'
    (line,) = JsonFormatter().format(record(said, status=200, nothing=None)).splitlines()
    told = json.loads(line)
    assert told["time"][10] == "T"
    assert told["time"].endswith("Z")
    assert told | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "logger": "some.where",
        "process": multiprocessing.current_process().name,
        "message": said,
        "status": 200,
    }


def test_a_traceback_with_and_without_messages_of_exceptions() -> None:
    formatter = JsonFormatter()
    whole = json.loads(formatter.format(record(error=raised())))["exception"]
    assert "KeyError: 'secret'" in whole
    formatter.shows_messages = False
    bare = json.loads(formatter.format(record(error=raised())))["exception"]
    assert "secret" not in bare.replace('KeyError("secret") from ZeroDivisionError("secret")', "")
    assert bare.index("ZeroDivisionError\n") < bare.index("in raised") < bare.index("KeyError", bare.index("in raised"))


def test_quoted_text_cannot_begin_a_line() -> None:
    """Quoted text cannot control a terminal either; a traceback keeps its lines."""
    said = "a\nb\rc\x1b[31m\x85\u2028\u2029\x7f ü"
    (line,) = TextFormatter("%(message)s").format(record(said)).splitlines()
    assert line == r"a\nb\rc\x1b[31m\x85\u2028\u2029\x7f ü"
    first, *trace = (
        TextFormatter("%(message)s").format(record("it\nfailed", ValueError("red\x1b[31m\nand more"))).split("\n")
    )
    assert first == r"it\nfailed"
    assert trace == [r"ValueError: red\x1b[31m", "and more"]


def test_logging_does_not_wait_for_a_reader() -> None:
    """The number of lost lines is in the log as soon as it is read."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader) as read:
        handler = QueuedHandler(stream, max_lines=10)
        handler.setFormatter(TextFormatter("%(message)s"))
        for i in range(100):
            handler.emit(record(f"{i:03}" + "x" * 9997))  # would never return if it waited: nothing is read until then
        kept, lost = [], 0
        while len(kept) + lost < 100:
            line = read.readline()
            if line.endswith(" lines were lost here\n"):
                lost += int(line.split()[0])
            else:
                kept.append(line[:3])
        handler.close()
    assert lost > 50
    assert kept == sorted(kept)


def test_queued_lines_are_written_at_the_end() -> None:
    stream = StringIO()
    handler = QueuedHandler(stream)
    handler.setFormatter(TextFormatter("%(message)s"))
    for i in range(1000):
        handler.emit(record(str(i)))
    handler.close()
    assert stream.getvalue() == "".join(f"{i}\n" for i in range(1000))


FINALIZERS = """
import gc, logging, os
from server.logs import QueuedHandler
log = logging.getLogger("mine")
class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        log.info("freed")
reader, writer = os.pipe()  # nobody reads, so that there is no room soon
logging.basicConfig(handlers=[QueuedHandler(os.fdopen(writer, "w"), max_lines=100)], level="INFO")
for i in range(20_000):
    Cycle()
    gc.set_threshold(i % 50 + 1)  # so that it comes in all places
    log.info("line %d", i)
"""


UNREAD = """
import logging, sys
from config.settings import Settings
from server.logs import configure_logging
configure_logging(Settings())
for i in range(2000):
    logging.info("%d" + 100 * "x", i)
print("logged", flush=True)
"""


def test_a_process_ends_though_its_log_is_not_read() -> None:
    """With a StreamHandler behind the queue it would wait for ever: the writing thread holds that one's lock."""
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"logged\n"
        assert process.wait() == 0


def test_what_other_libraries_add_for_terminals_is_left_out() -> None:
    told = json.loads(JsonFormatter().format(record("Started", color_message="\x1b[36mStarted", request_id="a")))
    assert told["request_id"] == "a"
    assert "color_message" not in told


def test_finalizers_may_log_whenever_they_run() -> None:
    subprocess.run([sys.executable, "-c", FINALIZERS], check=True)


PROGRAM = """
import sys, threading, warnings, logging
from config.settings import Settings
from server.logs import configure_logging
configure_logging(Settings(log_format="json"))
logging.getLogger("mine").info("logged")
logging.getLogger("mine").info("%d", "badly logged")
warnings.warn("warned of")
print("printed", file=sys.stderr)
print("progress", end="\\r", file=sys.stderr)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
class Unraisable:
    def __del__(self):
        raise KeyError("nobody")
Unraisable()
raise LookupError("the end")
"""


def test_everything_that_a_process_logs_or_prints_is_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    told = [line["message"] + line.get("exception", "") for line in lines]
    for said in ("logged", "UserWarning: warned of", "printed", "progress"):
        assert any(said in each for each in told), said
    for kind in ("ZeroDivisionError: ", "KeyError: 'nobody'", "LookupError: the end"):
        assert any(kind in line.get("exception", "") for line in lines), kind


STRAY = """
import sys, threading
from config.settings import Settings
from server.logs import configure_logging
configure_logging(Settings(log_format="json"))
assert sys.stderr.encoding == "utf-8"
sys.stderr.buffer.write("bytes of ü \\n".encode() + b"and \\xff\\n")
sys.stderr.write("begun, ")
other = threading.Thread(target=lambda: print("by another", file=sys.stderr))
other.start()
other.join()
print("ended \\udc80", file=sys.stderr)
for _ in range(20_000):
    print(end=".", file=sys.stderr, flush=True)
"""


def test_whatever_is_written_to_stderr_becomes_lines() -> None:
    """Also as bytes, by several threads, or without an end."""
    done = subprocess.run([sys.executable, "-c", STRAY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line)["message"] for line in done.stderr.splitlines()]
    assert told[:4] == ["bytes of ü ", "and \\xff", "by another", "begun, ended \\udc80"]
    assert told[4:] == ["." * 8193] * 2


def test_an_error_at_the_start_is_json_too() -> None:
    command = [sys.executable, "-m", "server", "serve", "--log-format", "json", "--model", "/none/here", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    *_, told = map(json.loads, done.stderr.splitlines())
    assert told["level"] == "ERROR"
    assert "no model at '/none/here'" in told["message"]

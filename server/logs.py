"""Logging of every process: lines of text or of JSON on stderr, written by a thread of their own.

The queue classes are the standard library's (QueueHandler, QueueListener); python-json-logger formats JSON. A record
may have fields (`extra=fields(...)`), which only JSON shows: for people the message alone says enough. Does not know
requests or the engine.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter as BaseJsonFormatter

from config.settings import Settings

TEXT_FORMAT = "%(asctime)s %(levelname)s %(processName)s: %(message)s"
JSON_NAMES = {"asctime": "time", "levelname": "level", "name": "logger", "processName": "process", "message": "message"}
MAX_QUEUED_LINES = 10_000  # maximum number of lines that wait to be written; further ones are dropped
FLUSH_TIMEOUT = 1.0  # maximum seconds for which a process that ends writes the lines that still wait
MAX_PARTIAL_LINE_BYTES = 8192  # maximum bytes printed to stderr that wait for the end of their line

log = logging.getLogger(__name__)


def configure_logging(settings: Settings) -> None:
    """Set up logging for the whole process, once: messages, warnings and stderr output of libraries are included."""
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper())
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # no output for errors of logging itself, which would be printed beside the log
    sys.excepthook = lambda kind, error, trace: log.critical("an exception ends the process", exc_info=error)
    sys.unraisablehook = lambda it: log.error("an exception was raised where none can be caught", exc_info=it.exc_value)
    threading.excepthook = lambda it: log.error("an exception ends a thread", exc_info=it.exc_value)
    if settings.log_format == "json":
        # Progress bars of downloads, which are not lines, are switched off
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        sys.stderr = io.TextIOWrapper(StderrToLog(sys.stderr), "utf-8", "backslashreplace", write_through=True)


def hide_exception_messages() -> None:
    """Log tracebacks without the messages of exceptions from now on: these may quote what clients sent."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, ExceptionFormatter):
            handler.formatter.shows_messages = False


def fields(**values: Any) -> dict[str, Any]:
    """Return the argument `extra` of a logging call, without the values that are None."""
    return {name: value for name, value in values.items() if value is not None}


class ExceptionFormatter(logging.Formatter):
    """A formatter that shows tracebacks with or without the messages of exceptions."""

    shows_messages = True

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if self.shows_messages else format_traceback_types(ei[1])


class TextFormatter(ExceptionFormatter):
    """logging's own format, escaped: text in a message can neither begin a line nor control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")  # a traceback has several
        return "\n".join(map(escape_unprintable, lines))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_unprintable(super().formatMessage(record).rstrip())


class JsonFormatter(ExceptionFormatter, BaseJsonFormatter):
    """A JSON object per line, in ASCII; `time` as RFC 3339 writes it, in UTC, with milliseconds."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        names = JSON_NAMES | {"exc_info": "exception"}
        # color_message is uvicorn's: a message with escape codes for a terminal
        reserved = [*RESERVED_ATTRS, "color_message"]
        super().__init__(list(JSON_NAMES), rename_fields=names, reserved_attrs=reserved, json_default=str)


def escape_unprintable(text: str) -> str:
    """Return a text in which unprintable characters, line breaks included, are replaced by escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def format_traceback_types(error: BaseException | None) -> str:
    """Return a traceback with the types of an exception and of its causes, the first cause first, without messages."""
    parts: list[str] = []
    while error is not None:
        parts.insert(0, "".join(traceback.format_tb(error.__traceback__)) + type(error).__qualname__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(parts)


class QueuedHandler(QueueHandler):
    """A handler that writes to a stream in another thread, so that no thread waits for a slow or stuck reader.

    Lines beyond `max_lines` are dropped and counted. The queue is not a queue.Queue: a finalizer may log while its own
    thread is in put(), which would then wait for its own lock.
    """

    def __init__(self, stream: TextIO, max_lines: int = MAX_QUEUED_LINES) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        super().__init__(self._lines)
        self._max_lines = max_lines
        self._writer = LineWriter(self._lines, stream, self.format)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < self._max_lines:
            super().emit(record)
        else:
            self._writer.num_dropped += 1

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def close(self) -> None:
        self._writer.stop()
        super().close()


class LineWriter(QueueListener):
    """The thread that writes the queue's lines to a stream.

    It calls no StreamHandler: logging.shutdown() waits for a StreamHandler's lock, and a process whose stderr is not
    read would never end.
    """

    def __init__(
        self, lines: queue.SimpleQueue[str | None], stream: TextIO, format_record: Callable[[logging.LogRecord], str]
    ) -> None:
        super().__init__(lines)
        self.num_dropped = 0
        self._num_reported = 0  # number of dropped lines already reported
        self._stream = stream
        self._format = format_record

    def handle(self, record: Any) -> None:
        """Write a line, then a line with the number of lines that were dropped since the last such report, if any."""
        self._write(record)
        if dropped := self.num_dropped - self._num_reported:
            self._num_reported += dropped
            lost = logging.LogRecord(__name__, logging.WARNING, "", 0, "%d lines were lost here", (dropped,), None)
            self._write(self._format(lost))

    def stop(self) -> None:
        """Write the queued lines; give up after FLUSH_TIMEOUT seconds if they are not read."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(FLUSH_TIMEOUT)

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # lines are dropped if nobody can read the stream any more
            self._stream.write(line + "\n")
            self._stream.flush()


class PartialLine(threading.local):
    """The beginning of a line that a thread has written to sys.stderr and not ended yet."""

    line = b""


class StderrToLog(io.RawIOBase):
    """The raw stream below sys.stderr: each line that is written to it becomes a line of the log."""

    name = "<stderr>"

    def __init__(self, real: TextIO) -> None:
        self._stderr = real
        self._partial_line = PartialLine()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stderr.fileno()

    def write(self, data: Any) -> int:
        given = bytes(data)
        *whole, begun = (self._partial_line.line + given.replace(b"\r", b"\n")).split(b"\n")
        if len(begun) > MAX_PARTIAL_LINE_BYTES:  # dots of progress, perhaps
            whole, begun = [*whole, begun], b""
        self._partial_line.line = begun
        for line in whole:
            if line.strip():
                log.warning("%s", line.decode(errors="backslashreplace"), extra=fields(stream="stderr"))
        return len(given)

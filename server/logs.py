"""How every process logs: lines of text or of JSON on stderr, written by a thread of their own.

A record may come with fields (`extra=fields(...)`), which JSON shows beside the message; the message says enough for
people. The formatter is so short that a library for it would not make it shorter. Knows neither requests nor engine.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from config.settings import Settings

TEXT_FORMAT = "%(asctime)s %(levelname)s %(processName)s: %(message)s"
MAX_QUEUED_LINES = 10_000  # that wait to be written
FLUSH_TIMEOUT = 1.0  # seconds they have when the process ends
MAX_PARTIAL_LINE_BYTES = 8192  # bytes on stderr that wait for the end of their line

log = logging.getLogger(__name__)

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def configure_logging(settings: Settings) -> None:
    """For the whole process, once: what libraries log, warn of and print to stderr is in the log, too."""
    handler = LineWriter(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper())
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # they would be printed beside the log
    sys.excepthook = lambda kind, error, trace: log.critical("an exception ends the process", exc_info=error)
    sys.unraisablehook = lambda it: log.error("an exception that nobody can catch", exc_info=it.exc_value)
    threading.excepthook = lambda it: log.error("an exception ends a thread", exc_info=it.exc_value)
    if settings.log_format == "json":
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # no lines at all
        sys.stderr = io.TextIOWrapper(StderrToLog(sys.stderr), "utf-8", "backslashreplace", write_through=True)


def hide_exception_messages() -> None:
    """From now on tracebacks are logged without the messages of exceptions: these may quote what clients sent."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextFormatter):
            handler.formatter.shows_messages = False


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """For `extra`, without those that are None."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class TextFormatter(logging.Formatter):
    """logging's own format, and tracebacks with or without the messages of exceptions.

    Whoever gets words into a message can neither begin a line with them nor steer a terminal.
    """

    shows_messages = True

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(
            escape_unprintable(line) for line in super().format(record).split("\n")
        )  # tracebacks have several

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_unprintable(super().formatMessage(record).rstrip())

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if self.shows_messages else format_traceback_types(ei[1])


class JsonFormatter(TextFormatter):
    """An object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.processName,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def escape_unprintable(text: str) -> str:
    """With escapes for all else, line breaks too."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def format_traceback_types(error: BaseException | None) -> str:
    """Return a traceback with the types of the exception and of its causes, the first one first."""
    parts: list[str] = []
    while error is not None:
        parts.insert(0, "".join(traceback.format_tb(error.__traceback__)) + type(error).__qualname__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(parts)


class LineWriter(logging.Handler):
    """Writes to a stream, and nobody waits for whoever reads it or does not. What is too much is lost, and counted.

    A finalizer may log while its own thread is in emit(): a SimpleQueue allows that, a Queue would wait for itself.
    """

    def __init__(self, stream: TextIO, max_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._max_lines = max_lines
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= self._max_lines:
            self._dropped += 1
            return
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write what is queued, if the other end reads it soon."""
        self._lines.put(None)
        self._thread.join(FLUSH_TIMEOUT)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write_line(line)
            if dropped := self._dropped:
                self._dropped -= dropped
                told = logging.LogRecord(__name__, logging.WARNING, "", 0, "%d lines were lost here", (dropped,), None)
                self._write_line(self.format(told))

    def _write_line(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody will ever read it
            pass


class PartialLine(threading.local):
    """What a thread has written of a line."""

    line = b""


class StderrToLog(io.RawIOBase):
    """What is below a stderr whose lines become lines of the log."""

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

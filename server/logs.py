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

TEXT = "%(asctime)s %(levelname)s %(processName)s: %(message)s"
MOST_LINES = 10_000  # that wait to be written
LAST_LINES = 1.0  # seconds they have when the process ends
LONGEST_BEGUN = 8192  # bytes on stderr that wait for the end of their line

log = logging.getLogger(__name__)

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def configure_logging(settings: Settings) -> None:
    """For the whole process, once: what libraries log, warn of and print to stderr is in the log, too."""
    handler = LineWriter(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else Lines(TEXT))
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper())
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # they would be printed beside the log
    sys.excepthook = lambda kind, error, trace: log.critical("an exception ends the process", exc_info=error)
    sys.unraisablehook = lambda it: log.error("an exception that nobody can catch", exc_info=it.exc_value)
    threading.excepthook = lambda it: log.error("an exception ends a thread", exc_info=it.exc_value)
    if settings.log_format == "json":
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # no lines at all
        sys.stderr = io.TextIOWrapper(Stray(sys.stderr), "utf-8", "backslashreplace", write_through=True)


def quote_no_exceptions() -> None:
    """From now on tracebacks are logged without the messages of exceptions: these may quote what clients sent."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Lines):
            handler.formatter.quotes = False


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """For `extra`, without those that are None."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class Lines(logging.Formatter):
    """logging's own format, and tracebacks with or without the messages of exceptions.

    Whoever gets words into a message can neither begin a line with them nor steer a terminal.
    """

    quotes = True

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line) for line in super().format(record).split("\n"))  # tracebacks have several

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record).rstrip())

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei) if self.quotes else without_messages(ei[1])


class JsonLines(Lines):
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


def printable(text: str) -> str:
    """With escapes for all else, line breaks too."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def without_messages(error: BaseException | None) -> str:
    """A traceback with the types of the exception and of those it came from, the first one first."""
    parts: list[str] = []
    while error is not None:
        parts.insert(0, "".join(traceback.format_tb(error.__traceback__)) + type(error).__qualname__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(parts)


class LineWriter(logging.Handler):
    """Writes to a stream, and nobody waits for whoever reads it or does not. What is too much is lost, and counted.

    A finalizer may log while its own thread is in emit(): a SimpleQueue allows that, a Queue would wait for itself.
    """

    def __init__(self, stream: TextIO, most: int = MOST_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._most = most
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= self._most:
            self._dropped += 1
            return
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """What is there is written, if somebody reads it soon."""
        self._lines.put(None)
        self._thread.join(LAST_LINES)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            self._put(line)
            if dropped := self._dropped:
                self._dropped -= dropped
                told = logging.LogRecord(__name__, logging.WARNING, "", 0, "%d lines were lost here", (dropped,), None)
                self._put(self.format(told))

    def _put(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody will ever read it
            pass


class Begun(threading.local):
    """What a thread has written of a line."""

    line = b""


class Stray(io.RawIOBase):
    """What is below a stderr whose lines become lines of the log."""

    name = "<stderr>"

    def __init__(self, real: TextIO) -> None:
        self._real = real
        self._begun = Begun()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._real.fileno()

    def write(self, data: Any) -> int:
        given = bytes(data)
        *whole, begun = (self._begun.line + given.replace(b"\r", b"\n")).split(b"\n")
        if len(begun) > LONGEST_BEGUN:  # dots of progress, perhaps
            whole, begun = [*whole, begun], b""
        self._begun.line = begun
        for line in whole:
            if line.strip():
                log.warning("%s", line.decode(errors="backslashreplace"), extra=fields(stream="stderr"))
        return len(given)

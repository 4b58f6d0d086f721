"""The error for a setting that cannot be used, and messages for errors of the operating system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_MESSAGE_LENGTH = 2000  # maximum number of characters of a message, which may quote a long value


class SettingsError(Exception):
    """An error that the user can fix; the message says what to change."""

    def __str__(self) -> str:
        return _shorten(super().__str__())


@contextmanager
def convert_write_errors(flag: str, file: Path) -> Iterator[None]:
    """Raise SettingsError in place of an OSError within the block, which writes the file of a flag."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{flag}: cannot write {file}: {error.strerror}") from None


def format_error(error: Exception) -> str:
    """Return an error's message for the user; for an OSError, the operating system's reason and the file's name."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f" ({error.filename})" if error.filename else ""
    return _shorten(f"the operating system refuses to go on: {error.strerror}{place}")


def _shorten(message: str) -> str:
    """Return a message; if it has more than 2,000 characters, its middle is left out."""
    half = MAX_MESSAGE_LENGTH // 2
    return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:half]} ... {message[-half:]}"

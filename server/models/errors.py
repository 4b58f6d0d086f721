"""What is wrong with a model, in words for the user who named it."""

from __future__ import annotations

from config.errors import SettingsError


class ModelError(SettingsError):
    """A model that cannot be served; the message tells the user why, and what can."""


class UnknownModelError(ModelError):
    """A model that the lean decoder does not know; transformers may."""


def first_line(error: Exception) -> str:
    """Return the first line of what a library says, which may be a page; the error's class if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""Errors in a model's files, with messages for the user who chose the model."""

from __future__ import annotations

from config.errors import SettingsError


class ModelError(SettingsError):
    """A model that cannot be served; the message names the reason and, if there is one, a remedy."""


class UnknownModelError(ModelError):
    """A model that the lean decoder does not support, but transformers may."""


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, which may be long; the class name if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""What is wrong with a model, in words for the user who named it."""

from __future__ import annotations

from config.settings import SettingsError


class ModelError(SettingsError):
    """A model that cannot be served; the message tells the user why, and what can."""


class UnknownModelError(ModelError):
    """A model that the lean decoder does not know; transformers may."""

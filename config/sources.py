"""The sources of settings, their precedence, and how an error message names the source of a refused value.

A value on the command line takes precedence over the environment (KVMUX_...), and that over the settings file. Knows no
settings: `settings.py` passes them and checks the values.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from config.errors import SettingsError
from config.flags import flag_name

ENV_PREFIX = "KVMUX_"
ENV_CONFIG = "KVMUX_CONFIG"  # environment variable that names the settings file, and is no setting
# The only table in which variables set one value: KVMUX_STRATEGIES__<instance>__<option>.
ENV_NESTED = "KVMUX_STRATEGIES"


def env_name(setting: str) -> str:
    """Return the name of a setting's environment variable, such as KVMUX_PORT."""
    return ENV_PREFIX + setting.upper()


class Sources(NamedTuple):
    """The values of the settings in each source (settings file, environment, caller), by name of the setting."""

    file: Path | None
    from_file: Mapping[str, Any]
    from_environment: Mapping[str, Any]
    from_caller: Mapping[str, Any]
    caller_gives_flags: bool  # whether the caller's values are flags of a command line; else arguments in Python

    def merge(self) -> dict[str, Any]:
        """Return each setting's value from its strongest source: the caller, else the environment, else the file."""
        return _merge_tables(_merge_tables(self.from_file, self.from_environment), self.from_caller)

    def format_origin(self, path: tuple[str | int, ...]) -> str:
        """Return where the value at `path` (setting, keys) is from: " (from --port)", or "" for a Python argument."""
        if path and _has_path(self.from_caller, path):
            return f" (from {flag_name(str(path[0]))})" if self.caller_gives_flags else ""
        if path and _has_path(self.from_environment, path):
            return f" (from the environment, {env_name(str(path[0]))})"
        return f" (from {self.file})" if path and _has_path(self.from_file, path) else ""


def _merge_tables(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested tables key by key; of a key that both have, the value of `stronger` is taken."""
    both = dict(weaker)
    for key, value in stronger.items():
        old = both.get(key)
        both[key] = _merge_tables(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def _has_path(values: Any, path: tuple[str | int, ...]) -> bool:
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def read_file(file: Path) -> dict[str, Any]:
    """Return the contents of a settings file. Raises SettingsError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(_read_text(file))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {file}: {error.strerror}") from None
    except UnicodeError:
        raise SettingsError(f"the settings file {file} is not UTF-8: save it as UTF-8 in your editor") from None
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, not UTF-8, or a number with too many digits
        raise SettingsError(f"{file} is not TOML: {error}") from None


def _read_text(file: Path) -> str:
    """Return the text of a file. Raises UnicodeError if it is not UTF-8, also for UTF-16 that looks like it."""
    text = file.read_text(encoding="utf-8-sig")
    if "\0" in text:
        raise UnicodeError("every other byte is zero in UTF-16 without a byte order mark")
    return text


def read_environment(settings: type[BaseSettings]) -> dict[str, Any]:
    """Return the settings in the environment. Raises SettingsError for a variable KVMUX_... that cannot take effect.

    Such a variable names no setting, sets a part of a setting that is not a table, or is not JSON although its setting
    consists of tables. pydantic-settings would ignore the first two.
    """
    known = {*map(env_name, settings.model_fields), ENV_CONFIG}
    for given in os.environ:
        setting, *keys = given.upper().split("__")
        if setting in known and keys and setting != ENV_NESTED:
            raise SettingsError(f"the environment sets {given}, but {setting} is not a table; set {setting} itself")
        if setting.startswith(ENV_PREFIX) and setting not in known:
            suggestion = did_you_mean(given.upper(), known)
            raise SettingsError(f"the environment sets {given}, which is not a setting{suggestion}")
    return _Environment(settings)()


class _Environment(EnvSettingsSource):
    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except (ValueError, RecursionError):
            name = env_name(field_name)
            raise SettingsError(
                f"the value of {name} is not JSON; a settings file (--config) is easier to write"
            ) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name closest to `name`, for an error message; "" if none is close.

    Of several equally close names, one with the same first two letters is preferred.
    """

    def likeness(other: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, other, name).ratio(), other[:2] == name[:2]

    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {max(close, key=likeness)}?" if close else ""

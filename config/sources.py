"""The sources of settings, their precedence, and how an error message names the source of a refused value.

A value on the command line beats the environment (KVMUX_...), which beats the file. Knows which settings are tables,
but not the other settings: `settings.py` passes their names and checks the values.
"""

from __future__ import annotations

import difflib
import json
import logging
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import SettingsError

log = logging.getLogger(__name__)

ENV_PREFIX = "KVMUX_"
ENV_FOREIGN = frozenset({"KVMUX_CONFIG"})  # read by the command line; not settings
ENV_JSON = frozenset({"KVMUX_STRATEGIES", "KVMUX_RULES", "KVMUX_KEY_LIMITS"})
RENAMED = {"max_step_tokens": "max_num_batched_tokens", "max_waiting": "max_queued_requests"}  # old names still work
ENV_NESTED_PREFIX = "KVMUX_STRATEGIES__"  # the only variables that reach into a setting: __<instance>__<option>


def env_name(setting: str) -> str:
    """Return the environment variable of a setting."""
    return ENV_PREFIX + setting.upper()


def flag_name(setting: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + setting.replace("_", "-")


class Sources(NamedTuple):
    """The values that each source gives, by setting."""

    file: Path | None
    from_file: Mapping[str, Any]
    from_environment: Mapping[str, Any]
    from_caller: Mapping[str, Any]
    caller_gives_flags: bool  # the caller's values come from a command line

    def merge(self) -> dict[str, Any]:
        """Return the values that count: the caller's, else the environment's, else the file's."""
        return _merge_tables(_merge_tables(self.from_file, self.from_environment), self.from_caller)

    def format_origin(self, path: tuple[str | int, ...]) -> str:
        """Return the strongest source that gives a value at `path`, as in " (from --port)"; empty for an argument."""
        if path and _has_path(self.from_caller, path):
            return f" (from {flag_name(str(path[0]))})" if self.caller_gives_flags else ""
        if path and _has_path(self.from_environment, path):
            return f" (from the environment, {env_name(str(path[0]))})"
        return f" (from {self.file})" if path and _has_path(self.from_file, path) else ""


def _merge_tables(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables, key by key; where both give a value the stronger one counts."""
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
    """Read a settings file. Raises SettingsError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, not UTF-8, or more digits than Python reads
        raise SettingsError(f"{file} is not TOML: {error}") from None


def apply_renames(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one source under the settings' present names.

    Raises SettingsError if a setting is given under its old and its new name.
    """
    found = dict(values)
    for old, new in RENAMED.items():
        if old in found:
            if new in found:
                raise SettingsError(f"{old} is the old name of {new}, and both are given: leave {old} out")
            found[new] = found.pop(old)
            log.warning("%s is called %s now; the old name will not work in version 2", old, new)
    return found


def read_renamed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values that the environment gives under old names of settings, by old name."""
    names = {env_name(old): old for old in RENAMED}
    return {names[given.upper()]: value for given, value in environ.items() if given.upper() in names}


def check_environment(environ: Mapping[str, str], settings: Collection[str]) -> None:
    """Refuse a KVMUX_ variable that cannot take effect: pydantic-settings ignores those silently.

    Raises SettingsError.
    """
    known = {env_name(name) for name in (*settings, *RENAMED)} | ENV_FOREIGN
    for given, value in environ.items():
        name = given.upper()
        if not name.startswith(ENV_PREFIX):
            continue
        setting = name.split("__")[0]
        if setting not in known:
            raise SettingsError(f"the environment sets {given}, which is not a setting{did_you_mean(name, known)}")
        if name != setting and not name.startswith(ENV_NESTED_PREFIX):
            raise SettingsError(f"the environment sets {given}, but {setting} is not a table; set {setting} itself")
        if name in ENV_JSON and not _is_json(value):
            raise SettingsError(f"{given} is not JSON; a settings file (--config) is easier to write")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest known name, to end an error message; empty if none is close.

    Among names that are equally close it is one with the same first two letters.
    """

    def likeness(other: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, other, name).ratio(), other[:2] == name[:2]

    close = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {max(close, key=likeness)}?" if close else ""

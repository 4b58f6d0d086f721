"""`kvmux profile --url`: has a running server record its next steps, saves the trace and prints a table.

Depends on the route /v1/profile and its response alone; loads neither torch nor a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from config.errors import SettingsError
from config.flags import flag_name
from config.settings import load_settings
from server.cli.flags import pop_settings_file
from server.profiling.flags import ProfileOptions

PROFILE_OPTIONS = ("url", "steps", "seconds", "trace")
TOKEN = "admin_token"
DEFAULT_SECONDS = 10.0  # maximum seconds of a recording if --seconds is not given
EXTRA_TIMEOUT = 150.0  # seconds that the response may take after the recording has ended
ROWS = 25


def run(options: dict[str, Any]) -> int:
    """Record the next steps of a running server; write the trace and print a table of the times in it.

    `options` are the flags given. Raises SettingsError for wrong flags, or if the server refuses or does not answer.
    """
    file = pop_settings_file(options)
    wanted = {name: options.pop(name) for name in PROFILE_OPTIONS if name in options}
    if others := sorted(options.keys() - {TOKEN}):
        flags = ", ".join(flag_name(name) for name in others)
        raise SettingsError(
            f"{flags}: a running server has its own settings; with --url only --steps, --seconds and --trace apply"
        )
    trace: Path = wanted.pop("trace", ProfileOptions.trace)
    token = load_settings(file, options).admin_token
    if token is None:
        raise SettingsError("--url: give the server's admin token: KVMUX_ADMIN_TOKEN, --admin-token or a settings file")
    is_new = not trace.exists()
    # Check that the file can be written before any slow work; an older trace in it is kept until there is a new one.
    with _check_trace_folder(trace).open("ab"):
        pass
    try:
        answer = _request_profile(wanted.pop("url"), token, wanted)
        summary = _read_summary(answer)
    except BaseException:
        if is_new:
            trace.unlink(missing_ok=True)
        raise
    _check_trace_folder(trace).write_bytes(answer)
    Console(soft_wrap=True).print(_format_summary(summary, trace))
    Console().print(_make_table(summary["table"]))
    return 0


def _check_trace_folder(trace: Path) -> Path:
    """Return `trace`, the file to write. Raises SettingsError if its folder does not exist."""
    if not trace.absolute().parent.is_dir():
        raise SettingsError(f"--trace: there is no folder {trace.parent}")
    return trace


def _request_profile(url: str, token: str, wanted: Mapping[str, Any]) -> bytes:
    """Return the trace that the server sends. Raises SettingsError if it refuses or cannot be reached."""
    timeout = wanted.get("seconds", DEFAULT_SECONDS) + EXTRA_TIMEOUT
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with Console(stderr=True).status("the server records its next steps"):
            answer = httpx.post(f"{url.rstrip('/')}/v1/profile", json=wanted, headers=headers, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SettingsError(f"--url: {url} does not answer: {error}") from None
    if answer.status_code != 200:
        raise SettingsError(f"--url: {_get_error_message(answer)}")
    return answer.content


def _read_summary(answer: bytes) -> Mapping[str, Any]:
    """Return the summary in a trace from a kvmux server. Raises SettingsError if `answer` is not such a trace."""
    match _decode_json(answer):
        case {"kvmux": dict(summary)}:
            return summary
    raise SettingsError("--url: the server answered with something that is not a trace: is it kvmux?")


def _get_error_message(answer: httpx.Response) -> str:
    match _decode_json(answer.content):
        case {"error": {"message": message}}:
            return str(message)
    return f"the server answered {answer.status_code}: is it kvmux?"


def _decode_json(answer: bytes) -> Any:
    """Return the decoded response; None if it is not JSON."""
    try:
        return json.loads(answer)
    except ValueError:
        return None


def _format_summary(summary: Mapping[str, Any], trace: Path) -> str:
    found = f"{summary['steps']} steps in {summary['seconds']:.2f} s, {summary['model']}"
    if not summary["steps"]:
        found += ": no request ran meanwhile, so there is nothing to see"
    return escape(f"{found}\nthe trace for https://ui.perfetto.dev or chrome://tracing is in {trace}")


def _make_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.MARKDOWN)
    table.add_column("name", overflow="fold")
    for column in ("kind", "calls", "ms", "ms of its own"):
        table.add_column(column, justify="right")
    for row in rows[:ROWS]:
        times = (f"{row[each] * 1e3:.3f}" for each in ("seconds", "own_seconds"))
        table.add_row(escape(row["name"]), row["kind"], str(row["calls"]), *times)
    return table

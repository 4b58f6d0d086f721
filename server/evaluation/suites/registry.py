"""The tasks by name, and the suites that group them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from config.errors import SettingsError
from config.sources import did_you_mean
from server.evaluation.suites.arithmetic import ARITHMETIC
from server.evaluation.suites.completion import COMPLETION
from server.evaluation.suites.ruler import RULER
from server.evaluation.suites.scbench import SCBENCH
from server.evaluation.suites.task import SuiteTask
from server.evaluation.suites.tool_calls import TOOL_CALLS

TASKS: Mapping[str, SuiteTask] = {task.name: task for task in (*RULER, *SCBENCH, *TOOL_CALLS, ARITHMETIC, COMPLETION)}
SUITES: Mapping[str, Sequence[str]] = {
    "all": list(TASKS),
    "ruler": [task.name for task in RULER],
    "scbench": [task.name for task in SCBENCH],
    "tool_calls": [task.name for task in TOOL_CALLS],
    "quick": ["niah_single_1", "tool_calls_50", "arithmetic", "completion"],
}


def select_tasks(names: Sequence[str]) -> list[SuiteTask]:
    """Return the tasks that the names of suites and tasks stand for, each once. Raises SettingsError for others."""
    known = {**SUITES, **{name: [name] for name in TASKS}}
    for name in names:
        if name not in known:
            raise SettingsError(
                f"--suite: there is no suite or task {name!r}{did_you_mean(name, known)}; suites: {', '.join(SUITES)}; "
                f"tasks: {', '.join(TASKS)}"
            )
    return [TASKS[name] for name in dict.fromkeys(task for name in names for task in known[name])]

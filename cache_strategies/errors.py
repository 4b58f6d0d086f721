"""The error that a strategy's fault becomes where the engine calls it. Imports no torch, as the scheduler does not."""

from __future__ import annotations


class StrategyError(Exception):
    """A strategy instance raised, returned something wrong or left something undone; other instances can go on.

    `method` is the name of the method of the cache or the sequence that was at fault; if it only reports something that
    no request needs, `is_report` is set. The engine sets `is_counted`, if it has counted the fault.
    """

    def __init__(
        self, instance: str, method: str, problem: str, *, is_report: bool = False, is_counted: bool = False
    ) -> None:
        super().__init__(f"cache strategy {instance!r} failed in {method}(): {problem}")
        self.instance = instance
        self.method = method
        self.problem = problem
        self.is_report, self.is_counted = is_report, is_counted

    @property
    def message(self) -> str:
        """The error message for clients whose requests end because of the fault."""
        return f"{self}; other strategies go on"

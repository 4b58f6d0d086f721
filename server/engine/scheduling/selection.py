"""Chooses the strategy instance of a request: by its body, else header, model alias, the settings' rules, the default.

Knows names and rules; no strategy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from config.settings import SelectionRule
from server.engine.ipc.messages import Submit
from server.engine.scheduling.request import RequestError


class Selector:
    """Chooses the strategy instance of each request."""

    def __init__(self, names: Collection[str], rules: Sequence[SelectionRule], default: str) -> None:
        assert default in names
        self._names = names
        self._rules = rules
        self._default = default

    def choose(self, submit: Submit, kv_usage: float) -> tuple[str, str]:
        """Return the name of the instance and the reason: "request", "header", "model", "rule <i>" or "default".

        `kv_usage` is the share of the KV memory in use, 0 to 1. Raises RequestError for an unknown name.
        """
        sources = (
            ("request", submit.kv_cache, "kv_cache", "kv_cache"),
            ("header", submit.header, "header X-KV-Cache", None),
            ("model", submit.alias, "model", "model"),
        )
        for reason, name, field, param in sources:
            if name is not None:
                return self.check_name(name, field, param), reason
        for i, rule in enumerate(self._rules):
            if matches(rule, len(submit.prompt), submit.priority, kv_usage):
                return rule.use, f"rule {i}"
        return self._default, "default"

    def check_name(self, name: str, field: str, param: str | None) -> str:
        """Return an instance's name, which a request gives in `field`. Raises RequestError for an unknown one."""
        if name not in self._names:
            message = f"{field}: there is no cache strategy {name!r}; there are {', '.join(sorted(self._names))}"
            raise RequestError(400, message, code="unknown_kv_cache", param=param)
        return name


def matches(rule: SelectionRule, prompt_tokens: int, priority: int, kv_usage: float) -> bool:
    """Return whether a request meets all conditions of a rule; conditions that are None always hold."""
    return (
        (rule.min_prompt_tokens is None or prompt_tokens >= rule.min_prompt_tokens)
        and (rule.max_prompt_tokens is None or prompt_tokens <= rule.max_prompt_tokens)
        and (rule.min_priority is None or priority >= rule.min_priority)
        and (rule.max_priority is None or priority <= rule.max_priority)
        and (rule.kv_usage_above is None or kv_usage > rule.kv_usage_above)
    )

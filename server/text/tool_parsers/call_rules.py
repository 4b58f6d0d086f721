"""The rules of a grammar that admits nothing but tool calls in a family's form, or a text with such calls.

`message_grammar.py` puts calls into the grammar of a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from server.grammar.rules import GrammarRules, quote_string
from server.text.tool_parsers.argument_rules import ArgumentRules
from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.tool_format import CallForm

SPACE = r"/[ \n]{0,4}/"  # between calls
_JSON_PARTS = re.compile(r'"[^"]*"|.')


class CallRules:
    """Adds the rules of calls of these tools to a grammar."""

    def __init__(self, rules: GrammarRules, form: CallForm, schemas: Schemas, *, parallel: bool) -> None:
        """Prepare the rules of calls of the tools in `schemas`; without `parallel`, of one call."""
        self._rules = rules
        self._form = form
        self._schemas = schemas
        self._parallel = parallel
        self._arguments = ArgumentRules(rules, form)

    def add_calls(self) -> str:
        """Add the rule of a text that consists of calls only."""
        if self._form.between:
            return self._rules.add("calls", self._write_list(self._form.before))
        one = self._rules.add("call", " | ".join(self._add_call(*tool) for tool in self._number_tools()))
        return self._rules.add("calls", f"{one} ({self._rules.add('SPACE', SPACE)} {one})*" if self._parallel else one)

    def add_text_with_calls(self, marker: str) -> str:
        """Add the rule of a text in which each `marker` begins a call, or a list of calls.

        If the marker is empty, what comes before the arguments begins a call, and a tool's name is a part of that.
        """
        if self._form.between:
            assert marker, "a list that begins like any text cannot be told from it"
            text = self._rules.add_text_until("before", [marker])
            one = self._rules.add("call", f"{text} {self._write_list(self._form.before[len(marker) :])}")
        else:
            calls = [self._add_text_with_call(*tool, marker) for tool in self._number_tools()]
            one = self._rules.add("call", " | ".join(calls))
        return self._rules.add("text", f"{one}{'*' if self._parallel else '?'} {self._rules.add_text()}")

    def _number_tools(self) -> Iterable[tuple[str, str]]:
        """Return for each tool the name of its rule, and its own name."""
        return [(f"call_{number}", name) for number, name in enumerate(self._schemas)]

    def _write_list(self, before: str) -> str:
        """Add the rules of the calls in a list; return how the list is written, from `before` on."""
        calls = self._rules.add("item", " | ".join(self._add_call(*tool) for tool in self._number_tools()))
        more = f" ({quote_string(self._form.between)} {calls})*" if self._parallel else ""
        return f"{self._rules.quote(before)} {calls}{more} {self._rules.quote(self._form.after)}".strip()

    def _add_call(self, rule: str, name: str) -> str:
        """Add the rule of a call."""
        head, _ = self._form.split_call(name)
        return self._rules.add(rule, f"{self._quote_head(head)} {self._add_rest(rule, name)}")

    def _add_text_with_call(self, rule: str, name: str, marker: str) -> str:
        """Add the rule of a text and, after it, a call that begins with the marker."""
        head, _ = self._form.split_call(name)
        if marker:
            before, rest = self._rules.add_text_until("before", [marker]), self._quote_head(head[len(marker) :])
        else:
            before, rest = self._rules.add_text_until(f"{rule}_before", [head]), ""
        return self._rules.add(rule, f"{before} {rest} {self._add_rest(rule, name)}")

    def _add_rest(self, rule: str, name: str) -> str:
        """Add the rules of a call's arguments; return how a call goes on with them, and ends."""
        _, tail = self._form.split_call(name)
        return f"{self._arguments.add(rule, self._schemas[name])} {self._rules.quote(tail)}".strip()

    def _quote_head(self, head: str) -> str:
        """Return what comes before the arguments; without a marker, its brackets and strings are those of any JSON."""
        if self._form.is_plain_json:
            return " ".join(quote_string(part) for part in _JSON_PARTS.findall(head))
        return self._rules.quote(head)

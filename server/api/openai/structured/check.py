"""Checks what a request says its text has to be, and returns it as the grammar that the engine gets.

Whatever constrains a text (the fields of `models.py`, tools) is checked here. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping

from server.api.http.errors import ApiError
from server.api.http.json_body import format_value
from server.api.openai.generation_job import Serving
from server.api.openai.tools.message_format import MessageParsing
from server.grammar.constraint import Constraint, ConstraintKind, constrain_document
from server.records import ConstraintName, ConstraintRefusal
from server.text.errors import TextRefused, TextUnavailable

# How metrics name what constrains a text; messages without a document are constrained by their tools
NAMES: Mapping[ConstraintKind, ConstraintName] = {
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "lark": "tools",
}
REASONS: Mapping[str, ConstraintRefusal] = {  # by the error's code
    "grammar_too_large": "too_large",
    "grammar_timeout": "timeout",
    "grammar_memory": "memory",
    "grammar_crash": "crash",
}


def get_constraint(constraints: Iterable[Constraint]) -> Constraint | None:
    """Return the one constraint of a request; None if it has none. Raises ApiError for several."""
    found = list(constraints)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise ApiError(400, f"{second}: cannot be combined with {first}; send one of them", param=second)
    return found[0] if found else None


async def check_document(serving: Serving, frame: str, document: Constraint, further_param: str | None) -> str:
    """Return the grammar of a message of which a document is a part: `frame` is its grammar in Lark.

    `further_param` is the field that the frame is of; None: there is none. Raises as `check_constraint`.
    """
    if further_param is not None:
        await _check(serving, document)  # then an error of both together is not the document's
    grammar = await _check(serving, constrain_document(frame, document, further_param or document.param))
    serving.counts.constraints[NAMES[document.kind]] += 1
    return grammar


async def check_constraint(serving: Serving, constraint: Constraint) -> str:
    """Return the grammar of a constraint, as the engine gets it.

    Raises ApiError if it is wrong, too large, not supported (the message names the keyword of a schema) or takes too
    long to check; TextUnavailable if a later attempt may succeed.
    """
    grammar = await _check(serving, constraint)
    serving.counts.constraints[NAMES[constraint.kind]] += 1
    return grammar


async def _check(serving: Serving, constraint: Constraint) -> str:
    """Return the grammar of a constraint; count why it is refused if it is."""
    try:
        serving.limits.check_constraint(constraint)
        return await serving.tokenizer.check_grammar(constraint)
    except TextUnavailable:
        serving.counts.refusals["unavailable"] += 1
        raise
    except ApiError as error:
        serving.counts.refusals[find_reason(error.code)] += 1
        raise
    except TextRefused as error:
        serving.counts.refusals[find_reason(error.code)] += 1
        raise ApiError(
            400,
            f"{constraint.param}: {error}",
            param=constraint.param,
            code=error.code,
            log_message=f"{constraint.param}: it cannot be used ({error.code})",  # the message may quote the client
        ) from None


def find_reason(code: str | None) -> ConstraintRefusal:
    """Return the reason that metrics name for an error with this code."""
    return REASONS.get(code or "", "invalid")


async def check_readable(serving: Serving, document: Constraint, parsing: MessageParsing, prompt: str) -> None:
    """Raise ApiError for a choice that could not be told from a marker when the message is read."""
    if document.kind != "choice":
        return
    misread = await asyncio.to_thread(parsing.find_misread, json.loads(document.text), prompt)
    if misread is not None:
        message = (
            f"{document.param}: the choice {format_value(misread)} contains a marker with which this model writes "
            "reasoning, tool calls or parts of a message, so it could not be told from one; choose another text, or "
            "use /v1/completions"
        )
        serving.counts.refusals["invalid"] += 1
        raise ApiError(400, message, param=document.param, log_message=f"{document.param}: a choice has a marker")

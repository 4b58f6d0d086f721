"""Checks the constraint of a request's text, and returns it as the grammar that the engine gets.

Constraints come from the fields of `models.py` and from tools. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from config.wording import format_value
from server.api.http.errors import ApiError
from server.api.openai.generation_job import Serving
from server.api.openai.tools.message_format import MessageParsing
from server.grammar.constraint import Constraint, ConstraintKind, constrain_content, constrain_to_schema
from server.records import ConstraintName, ConstraintRefusal
from server.text.errors import TextRefused, TextUnavailable

# How metrics name constraints; "lark" is the kind of a message that only its tools constrain
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
    """Return the only constraint of a request; None if it has none. Raises ApiError for several."""
    found = list(constraints)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise ApiError(400, f"{second}: cannot be combined with {first}; send one of them", param=second)
    return found[0] if found else None


async def check_content(serving: Serving, frame: str, content: Constraint, frame_param: str | None) -> str:
    """Return the grammar of a message whose content is constrained: `frame` is the Lark grammar around the content.

    `frame_param` is the field that the frame follows from; None: only the model's format. Raises as `check_constraint`.
    """
    if frame_param is not None:  # check the content alone first: then an error of the whole is the frame's
        await _check(serving, content)
    grammar = await _check(serving, constrain_content(frame, content, frame_param or content.param))
    serving.counts.constraints[NAMES[content.kind]] += 1
    return grammar


async def check_constraint(serving: Serving, constraint: Constraint) -> str:
    """Return the grammar of a constraint, as the engine gets it.

    Raises ApiError if it is wrong, too large, not supported (the message names the keyword of a schema) or takes too
    long to check; TextUnavailable if a later attempt may succeed.
    """
    grammar = await _check(serving, constraint)
    serving.counts.constraints[NAMES[constraint.kind]] += 1
    return grammar


async def check_each_schema(serving: Serving, schemas: Mapping[str, Mapping[str, Any]], error: ApiError) -> None:
    """Raise ApiError, which names the tool, if one of the schemas of all tools is the cause of an error."""
    for name, schema in schemas.items() if find_reason(error.code) == "invalid" else ():
        constraint = constrain_to_schema(schema, f"tools: parameters of {format_value(name)}")
        try:
            await serving.tokenizer.check_grammar(constraint)
        except TextRefused as refused:
            message, logged = f"{constraint.param}: {refused}", "tools: a schema cannot be used"
            raise ApiError(400, message, param="tools", code=refused.code, log_message=logged) from None


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


async def check_readable(serving: Serving, content: Constraint, parsing: MessageParsing, prompt: str) -> None:
    """Raise ApiError if a choice has a marker, so that the parser would not return it as content."""
    if content.kind != "choice":
        return
    misread = await asyncio.to_thread(parsing.find_misread, json.loads(content.text), prompt)
    if misread is not None:
        message = (
            f"{content.param}: the choice {format_value(misread)} contains a marker with which this model writes "
            "reasoning, tool calls or parts of a message, so it could not be told from one; choose another text, or "
            "use /v1/completions"
        )
        serving.counts.refusals["invalid"] += 1
        raise ApiError(400, message, param=content.param, log_message=f"{content.param}: a choice has a marker")

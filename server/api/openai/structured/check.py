"""Checks what a request says its text has to be, and returns it as the grammar that the engine gets.

Whatever constrains a text (the fields of `models.py`, tools) is checked here. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.api.http.errors import ApiError
from server.api.openai.generation_job import Serving
from server.grammar.constraint import Constraint
from server.text.errors import TextRefused


async def check_constraints(serving: Serving, constraints: Iterable[Constraint]) -> str | None:
    """Return the Lark grammar of the one constraint of a request; None if it has none. Raises as `check_constraint`."""
    found = list(constraints)
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise ApiError(400, f"{second}: cannot be combined with {first}; send one of them", param=second)
    return await check_constraint(serving, found[0]) if found else None


async def check_constraint(serving: Serving, constraint: Constraint) -> str:
    """Return the Lark grammar of a constraint.

    Raises ApiError if it is wrong, too large, not supported (the message names the keyword of a schema) or takes too
    long to check; TextUnavailable if a later attempt may succeed.
    """
    serving.limits.check_constraint(constraint)
    try:
        return await serving.tokenizer.check_grammar(constraint)
    except TextRefused as error:
        raise ApiError(
            400,
            f"{constraint.param}: {error}",
            param=constraint.param,
            code=error.code,
            log_message=f"{constraint.param}: it cannot be used ({error.code})",  # the message may quote the client
        ) from None

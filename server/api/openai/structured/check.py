"""Checks what a request says its text has to be, and returns it as the grammar that the engine gets.

Whatever constrains a text (the fields of `models.py`, tools) is checked here. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.api.http.errors import ApiError
from server.api.openai.generation_job import Serving
from server.grammar.constraint import Constraint, constrain_document
from server.text.errors import TextRefused


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
        await check_constraint(serving, document)  # then an error of both together is not the document's
    return await check_constraint(serving, constrain_document(frame, document, further_param or document.param))


async def check_constraint(serving: Serving, constraint: Constraint) -> str:
    """Return the grammar of a constraint, as the engine gets it.

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

"""Names the fields of a body of /v1/responses in errors about the chat that the body stands for."""

from __future__ import annotations

from collections.abc import Mapping

from server.api.http.errors import ApiError, Location
from server.api.openai.response_items.input import ResponseRequest

FIELDS: Mapping[str, Location] = {  # by the chat's field
    "messages": ("input",),
    "prompt": ("input",),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens",),
    "response_format": ("text", "format"),
    "reasoning_effort": ("reasoning", "effort"),
}


def find_field(body: ResponseRequest, place: Location) -> Location:
    """Return the place in the body of a place in its chat."""
    match place:
        case ("messages", int(message), *_):
            first = 0 if body.instructions is None else 1
            return body.input.find_item(message - first) if message >= first else ("instructions",)
        case ("response_format", "json_schema", *rest):
            return (*FIELDS["response_format"], *rest)
        case ("tools", int(tool), "function", *rest):
            return ("tools", tool, *rest)
        case (str(field), *rest) if field in FIELDS:
            return (*FIELDS[field], *rest)
    return place


def rename_field(error: ApiError) -> ApiError:
    """Return the error with the body's name of the field that it is about."""
    if error.param is None or error.param not in FIELDS:
        return error
    name = ".".join(map(str, FIELDS[error.param]))
    message, logged = (
        f"{name}: {text.removeprefix(f'{error.param}: ')}" if text.startswith(f"{error.param}: ") else text
        for text in (error.message, error.log_message)
    )
    renamed = ApiError(error.status_code, message, param=name, code=error.code, log_message=logged)
    renamed.headers = error.headers
    return renamed

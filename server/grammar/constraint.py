"""A constraint on the text of a request, as a client gives it. Data only: `lark.py` turns it into a grammar.

Everything that constrains a text makes a Constraint: `response_format`, `structured_outputs`, and whatever else knows a
JSON schema or a Lark grammar. Knows neither HTTP nor a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

ConstraintKind: TypeAlias = Literal["json_schema", "regex", "choice", "grammar", "lark", "message"]

# White space within JSON, as llama.cpp allows it: none, a space, or one or two line feeds with indentation. As it has a
# longest form, a model cannot go on writing white space until it has no tokens left.
BOUNDED_WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
ANY_JSON = True  # the schema of every JSON value
JSON_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of every JSON object


class Constraint(NamedTuple):
    """What a text has to be. `text` has the form of its kind.

    json_schema  a JSON schema
    regex        a regular expression
    choice       a JSON list of texts
    grammar      a grammar of a client, in Lark or GBNF
    lark         a grammar of ours, in Lark
    message      a message's grammar and the constraint of its content, as `constrain_content` writes them
    """

    kind: ConstraintKind
    text: str
    param: str  # the field of the request that the constraint comes from, for errors


def constrain_to_schema(
    schema: Mapping[str, Any] | bool, param: str, *, whitespace: str | None = BOUNDED_WHITESPACE
) -> Constraint:
    """Return the constraint that a text is JSON that a schema accepts.

    `whitespace` is a regular expression of the white space between JSON's tokens; None: there is none.
    """
    return Constraint("json_schema", json.dumps(add_json_options(schema, whitespace), ensure_ascii=False), param)


def add_json_options(schema: Mapping[str, Any] | bool, whitespace: str | None) -> Mapping[str, Any] | bool:
    """Return a schema with llguidance's options in its member `x-guidance`; a client's own options are replaced."""
    if schema is False:
        return schema  # nothing is valid, however it is written
    members = {} if schema is True else {key: value for key, value in schema.items() if key != "x-guidance"}
    spaced = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    return members | {"x-guidance": spaced}


def constrain_to_choices(choices: Sequence[str], param: str) -> Constraint:
    """Return the constraint that a text is one of `choices`."""
    return Constraint("choice", json.dumps(list(choices), ensure_ascii=False), param)


def constrain_content(frame: str, content: Constraint, param: str) -> Constraint:
    """Return the constraint of a message by the Lark grammar `frame`, in which `@content` is a text by `content`."""
    return Constraint("message", json.dumps([frame, content.kind, content.text], ensure_ascii=False), param)

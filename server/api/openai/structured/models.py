"""The fields that constrain a text: OpenAI's, vLLM's, and llama.cpp's.

A request has at most one of them, which becomes a `Constraint`. Knows neither the engine nor how a constraint is
checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from config.wording import format_value
from server.api.http.json_body import Body, Ignored, get_field_notes
from server.grammar.constraint import (
    ANY_JSON,
    BOUNDED_WHITESPACE,
    JSON_OBJECT,
    Constraint,
    constrain_to_choices,
    constrain_to_schema,
)
from server.grammar.json_schema import adapt_schema

MAX_CHOICES = 2**15  # most texts of which one is chosen


def _parse_schema(value: Any, info: ValidationInfo) -> Any:
    """Return a JSON schema as llguidance reads it; it may also be sent as text, as to vLLM."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)  # as bodies are read: without half surrogate pairs, and NaN
        except (ValueError, RecursionError):
            raise ValueError("should be a JSON schema: an object, or its text") from None
    if not isinstance(value, dict | bool):
        raise ValueError(f"should be a JSON schema, not {format_value(value)}")
    return adapt_schema(value, get_field_notes(info.context).note_ignored)


def _check_choices(choices: list[str]) -> list[str]:
    if not choices:
        raise ValueError("should have at least one text")
    return choices


Schema = Annotated[Any, BeforeValidator(_parse_schema, json_schema_input_type=dict[str, Any] | bool | str)]
Choices = Annotated[list[str], Field(max_length=MAX_CHOICES), AfterValidator(_check_choices)]
Regex = Annotated[str, Field(min_length=1)]
Grammar = Annotated[str, Field(min_length=1)]


class JsonSchemaFormat(Body):
    path_prefix = "response_format.json_schema."

    name: str = Field("", max_length=256, description="no effect")
    schema_: Schema | None = Field(None, alias="schema", description="the schema of the text; default: any JSON")
    strict: Ignored[bool] = None
    description: Ignored[str] = None


class ResponseFormat(Body):
    """OpenAI's field: any text, a JSON object, or JSON that a schema accepts. Every schema is strict."""

    path_prefix = "response_format."

    type: Literal["text", "json_object", "json_schema"] = Field(description="what the text is")
    json_schema: JsonSchemaFormat | None = Field(None, description="only with the type json_schema")
    schema_: Schema | None = Field(
        None, alias="schema", description="llama.cpp's place of the schema; not with the type text"
    )

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        schemas = {"json_schema": self.json_schema, "schema": self.schema_}
        given = [name for name, schema in schemas.items() if schema is not None]
        if self.type == "json_schema" and len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"the type json_schema should have one of json_schema and schema, not {found}")
        if given and (self.type == "text" or (self.type == "json_object" and "json_schema" in given)):
            raise ValueError(f"the type {self.type} cannot be with {given[0]}")
        return self

    def make_constraint(self) -> Constraint | None:
        """Return the constraint of the text; None: it is any text."""
        if self.type == "text":
            return None
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if self.type == "json_object" and schema in (None, {}, True):
            schema = JSON_OBJECT
        return constrain_to_schema(ANY_JSON if schema is None else schema, "response_format")


class StructuredOutputs(Body):
    """vLLM's field: exactly one of json, regex, choice, grammar and json_object, and the white space of JSON."""

    path_prefix = "structured_outputs."

    json_: Schema | None = Field(None, alias="json", description="a JSON schema: an object, or its text")
    regex: Regex | None = Field(None, description="regular expression that the whole text matches")
    choice: Choices | None = Field(None, description="texts, one of which is the text")
    grammar: Grammar | None = Field(None, description="grammar of the text, in Lark or GBNF")
    json_object: bool = Field(False, description="whether the text is a JSON object")
    whitespace_pattern: Regex | None = Field(
        None,
        description="regular expression of the white space between the parts of JSON; default: one space, or up "
        "to two line feeds with indentation",
    )
    disable_any_whitespace: bool = Field(False, description="no white space between the parts of JSON")

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        names = [name for name in ("json_", "regex", "choice", "grammar") if getattr(self, name) is not None]
        names += ["json_object"] * self.json_object
        if len(names) != 1:
            found = " and ".join(name.rstrip("_") for name in names) or "none of them"
            raise ValueError(f"should have one of json, regex, choice, grammar and json_object, not {found}")
        return self

    def make_constraint(self) -> Constraint:
        """Return the constraint of the text."""
        param = "structured_outputs"
        if self.regex is not None:
            return Constraint("regex", self.regex, param)
        if self.choice is not None:
            return constrain_to_choices(self.choice, param)
        if self.grammar is not None:
            return Constraint("grammar", self.grammar, param)
        whitespace = None if self.disable_any_whitespace else self.whitespace_pattern or BOUNDED_WHITESPACE
        schema: Any = JSON_OBJECT if self.json_object else self.json_
        return constrain_to_schema(schema, param, whitespace=whitespace)


class StructuredRequest(Body):
    """The fields of a request that constrain its text."""

    response_format: ResponseFormat | None = Field(
        None, description="what the text is: any text, a JSON object, or JSON that a schema accepts"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="what the text is: JSON, by a regular expression, one of several texts, or by a grammar"
    )
    guided_json: Schema | None = Field(None, description="older name of structured_outputs.json")
    guided_regex: Regex | None = Field(None, description="older name of structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="older name of structured_outputs.choice")
    guided_grammar: Grammar | None = Field(None, description="older name of structured_outputs.grammar")
    guided_whitespace_pattern: Regex | None = Field(
        None, description="older name of structured_outputs.whitespace_pattern"
    )
    guided_decoding_backend: Ignored[str] = None
    grammar: Grammar | None = Field(None, description="llama.cpp's name of structured_outputs.grammar")
    json_schema: Schema | None = Field(None, description="llama.cpp's name of structured_outputs.json")

    def iter_constraints(self) -> Iterator[Constraint]:
        """Yield the constraint of each field that has one. `get_constraint` refuses more than one."""
        if self.response_format is not None and (constraint := self.response_format.make_constraint()) is not None:
            yield constraint
        if self.structured_outputs is not None:
            yield self.structured_outputs.make_constraint()
        whitespace = self.guided_whitespace_pattern or BOUNDED_WHITESPACE
        for param, schema in (("guided_json", self.guided_json), ("json_schema", self.json_schema)):
            if schema is not None:
                yield constrain_to_schema(schema, param, whitespace=whitespace)
        if self.guided_regex is not None:
            yield Constraint("regex", self.guided_regex, "guided_regex")
        if self.guided_choice is not None:
            yield constrain_to_choices(self.guided_choice, "guided_choice")
        for param, grammar in (("guided_grammar", self.guided_grammar), ("grammar", self.grammar)):
            if grammar is not None:
                yield Constraint("grammar", grammar, param)

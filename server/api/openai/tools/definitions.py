"""Tools as requests define them, and the choice among them, in OpenAI's form. Knows no model and no endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, PlainValidator, PrivateAttr, model_validator

from config.wording import format_value
from server.api.http.errors import ApiError
from server.api.http.json_body import Body, Ignored
from server.api.openai.request_models import LongList
from server.grammar.json_schema import adapt_schema
from server.grammar.schema_numbers import SchemaError

MAX_DESCRIPTION_LENGTH = 2**17  # characters; the context of most models has room for less
DROPPED_NULLS = ("type", "properties", "required")  # members of schemas that templates read
TOOL_NAME = r"^[A-Za-z0-9_./:-]{1,128}$"


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object of arguments. Raises ValueError for another schema, and a malformed one."""
    schema = _drop_nulls(schema)
    if isinstance(kind := schema.get("type", "object"), list) and "object" in kind and {*kind} <= {"object", "null"}:
        kind = schema["type"] = "object"  # arguments are never null
    if kind != "object":
        raise ValueError(f'should be the JSON schema of an object, with "type": "object", not {format_value(kind)}')
    if not isinstance(properties := schema.get("properties", {}), dict):
        raise ValueError(f"properties should be an object, not {format_value(properties)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"required should be a list of names, not {format_value(required)}")
    return schema


def _drop_nulls(schema: Any) -> Any:
    """Return a schema without null for these members, as Go, C# and Java write for what is empty."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if value is not None or key not in DROPPED_NULLS}
    if isinstance(properties := kept.get("properties"), dict):
        kept["properties"] = {name: _drop_nulls(each) for name, each in properties.items()}
    return kept | ({"items": _drop_nulls(kept["items"])} if "items" in kept else {})


def check_tool_type(tool: Any) -> None:
    """Raise ValueError for a tool of another type than function."""
    if isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "function":
        raise ValueError(f"tools of the type {format_value(kind)} are not supported; only functions are")


class FunctionDefinition(Body):
    path_prefix = "tools.function."

    name: str = Field(
        pattern=TOOL_NAME, description="name of its own among the tools: letters, digits and _ - . : /, up to 128"
    )
    description: str | None = Field(
        None, max_length=MAX_DESCRIPTION_LENGTH, description="what the function does, for the model"
    )
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] = Field(
        default_factory=dict, description="JSON schema of the arguments, which are an object"
    )
    returns: dict[str, Any] | None = Field(
        None, alias="return", description="JSON schema of the result, for the chat template"
    )  # as transformers' get_json_schema() writes it
    strict: bool | None = Field(None, description="whether a grammar holds calls to the schemas of all tools")


class Tool(Body):
    """A function that the model may call. The chat template gets it as the client wrote it."""

    path_prefix = "tools."

    type: Literal["function"] = Field(description="the only type of tools")
    function: FunctionDefinition = Field(description="the function, which the chat template gets as it is written here")
    cache_control: Ignored[dict[str, Any]] = None
    _written: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_written(cls, value: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        check_tool_type(value)
        tool = handler(value)
        if isinstance(value, dict):
            written = {key: member for key, member in value.items() if member is not None and key != "cache_control"}
            function = {key: member for key, member in value["function"].items() if member is not None}
            adapted = {"parameters": tool.function.parameters} if "parameters" in function else {}
            written["function"] = function | adapted
            tool._written = written
        return tool

    @property
    def written(self) -> dict[str, Any]:
        """Return the tool with its keys in the client's order, as chat templates write it."""
        return self._written


def _check_names(tools: list[Tool]) -> list[Tool]:
    counts = Counter(tool.function.name for tool in tools)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"there are several functions of the name {format_value(repeated[0])}")
    return tools


Tools = Annotated[LongList[Tool], AfterValidator(_check_names)]


class ToolChoice(NamedTuple):
    """Whether the model may, must or must not call a tool."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None  # of the tools that it may call; None: all
    is_one_call: bool = False  # whether a message has exactly one call

    def allows(self, name: str) -> bool:
        """Return whether the model may call the tool of this name."""
        return self.mode != "none" and (self.names is None or name in self.names)


_INVALID_CHOICE = (
    'should be "none", "auto", "required", {"type": "function", "function": {"name": ...}}, or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)


def _read_choice(value: Any) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function"} if (name := _read_reference(value)) is not None:
            return ToolChoice("required", frozenset([name]), is_one_call=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools, **further_of_tools},
            **further,
        } if not (further or further_of_tools):
            names = [_read_reference(tool) for tool in tools]
            if None not in names:
                return ToolChoice(mode, frozenset(name for name in names if name is not None))
    raise ValueError(f"{_INVALID_CHOICE}; not {format_value(value)}")


def _read_reference(value: Any) -> str | None:
    """Return the name in {"type": "function", "function": {"name": ...}}; None for another value."""
    match value:
        case {"type": "function", "function": {"name": str(name), **further_of_function}, **further} if not (
            further or further_of_function
        ):
            return name
    return None


ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_read_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]),
]


def check_choice(choice: ToolChoice | None, tools: Sequence[Tool]) -> None:
    """Raise ValueError for a choice that these tools do not allow."""
    if choice is None or (choice.mode != "required" and choice.names is None):
        return
    if not tools:
        raise ValueError("needs tools to choose from; send tools, or leave it out")
    names = [tool.function.name for tool in tools]
    if unknown := (choice.names or frozenset()) - set(names):
        raise ValueError(f"{format_value(min(unknown))} is none of the tools, which are {', '.join(names[:16])}")


def adapt_schemas(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Any]]:
    """Return the schemas of all tools as a grammar reads them, by name. Raises ApiError if one cannot be read."""
    adapted = {}
    for name, schema in get_schemas(tools).items():
        try:
            adapted[name] = adapt_schema(schema)
        except SchemaError as error:
            message, logged = f"tools: parameters of {format_value(name)}: {error}", "tools: a schema cannot be used"
            raise ApiError(400, message, param="tools", log_message=logged) from None
    return adapted


def get_schemas(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON schemas of the parameters of all tools, by name."""
    return {tool.function.name: tool.function.parameters for tool in tools}

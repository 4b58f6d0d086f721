"""The jinja environment of chat templates: sandboxed, with the functions that templates on the Hugging Face Hub use.

It behaves as the environment of transformers does; the tests compare both.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def make_environment() -> jinja2.Environment:
    """Return the sandboxed jinja environment that chat templates are compiled with."""
    language = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    language.filters["tojson"] = _to_json
    language.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": _make_namespace,
    }
    return language


def reads_content_parts(template: nodes.Template) -> bool:
    """Return whether a template iterates over a message's content as a list of parts; other templates expect text."""
    names = {"content"}  # variables and macro parameters that may hold a message's content
    names |= {
        assigned.target.name
        for assigned in template.find_all(nodes.Assign)
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node)
    }
    iterated = [_strip_filters(loop.iter) for loop in template.find_all(nodes.For)]
    return any(_is_content(node) or (isinstance(node, nodes.Name) and node.name in names) for node in iterated)


def find_compared_texts(template: nodes.Template) -> frozenset[str]:
    """Return the string constants that a template compares values with: among them are the roles it knows."""
    sides = [
        side
        for compare in template.find_all(nodes.Compare)
        for side in (compare.expr, *(operand.expr for operand in compare.ops))
    ]
    items = [item for side in sides for item in (side.items if isinstance(side, nodes.List | nodes.Tuple) else [side])]
    return frozenset(item.value for item in items if isinstance(item, nodes.Const) and isinstance(item.value, str))


def _is_content(node: nodes.Node | None) -> bool:
    """Return whether a node is message.content or message['content']."""
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _strip_filters(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


class _Generation(Extension):
    """The tag {% generation %}, which marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 -- jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """A jinja namespace that refuses names with a leading underscore, which would lead out of the sandbox."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace cannot have {name!r}: a name may not begin with an underscore"
            )
        super().__setitem__(name, value)


def _make_namespace(*given: Any, **attributes: Any) -> Namespace:
    namespace = _Namespace()
    for name, value in dict(*given, **attributes).items():
        namespace[name] = value
    return namespace


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the value as JSON, without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

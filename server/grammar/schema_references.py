"""Finds what the references (`$ref`) of a JSON schema point at: JSON pointers, alone or after a URI.

Knows no keyword but the one that names a schema (`$id`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

_IN_URI, _IN_FRAGMENT = "-._~!$&'()*+,;=:@/?%[]", "-._~!$&'()*+,;=:@/?%"  # characters that stand for themselves
_LONE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")


class Resource(NamedTuple):
    """A schema that has a URI, or the whole document: what the pointers of the references within it start at."""

    schema: Any
    path: tuple[str, ...]
    uri: str


Resources = tuple[Resource, ...]  # the document first, then those within each other, down to a schema


class Target(NamedTuple):
    """What a reference points at."""

    schema: Any
    path: tuple[str, ...]
    resources: Resources


def escape_reference(reference: str) -> str:
    """Return a reference with escapes for the characters that a URI cannot have, which generators of schemas write."""
    uri, hash, fragment = _LONE_PERCENT.sub("%25", reference).partition("#")
    return quote(uri, safe=_IN_URI) + hash + quote(fragment, safe=_IN_FRAGMENT)


def enter_resource(schema: dict[str, Any], path: tuple[str, ...], resources: Resources) -> Resources:
    """Return the resources around the members of a schema: with the schema itself if it has a URI of its own."""
    name = schema.get("$id", schema.get("id"))  # `id` in draft 4
    if not isinstance(name, str):
        return resources
    return (*resources, Resource(schema, path, urldefrag(_join(resources[-1].uri, name)).url))


def find_targets(reference: str, resources: Resources, named: Mapping[str, Resource]) -> Iterator[Target]:
    """Yield what a reference points at; `named` has resources by their URI.

    Readers differ in where a pointer without URI starts if resources are within each other, so it is followed from the
    document and from the two that are closest to the reference.
    """
    uri, fragment = urldefrag(reference)
    if fragment and not fragment.startswith("/"):
        return  # the name of an anchor, which only a schema has that keywords hold
    starts: list[Resources]
    if uri:
        wanted = urldefrag(_join(resources[-1].uri, uri)).url
        starts = [(resources[0], named[wanted])] if wanted in named else []
    else:
        starts = [resources[:count] for count in sorted({1, max(1, len(resources) - 1), len(resources)})]
    for start in starts:
        yield from _follow(unquote(fragment), start)


def _join(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # a bad address, which llguidance refuses
        return uri


def _follow(pointer: str, resources: Resources) -> Iterator[Target]:
    """Yield what a JSON pointer leads to from the innermost of these resources, if it is there.

    Resources that the pointer passes are not entered: llguidance does not, either.
    """
    schema, path, _ = resources[-1]
    keys = [escaped.replace("~1", "/").replace("~0", "~") for escaped in pointer.split("/")[1:]]
    for key in keys:
        if isinstance(schema, dict) and key in schema:
            schema = schema[key]
        elif isinstance(schema, list) and key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return
    yield Target(schema, (*path, *keys), resources)

"""Translates clang's errors to Metal's terms and the lines of the source. Knows address spaces by number only."""

from __future__ import annotations

import re

Fault = tuple[str, str]  # (place as file:line, description of what is wrong there)

SPACES = {"1": "device", "2": "constant", "3": "threadgroup"}  # as in include/declared/words.h
_DIAGNOSTIC = re.compile(r"^(?=.*: (?:fatal error|error|warning): )", re.MULTILINE)
_PLACE = re.compile(r"^(?:\./)?([^\s:][^:\n]*:\d+):\d+: ", re.MULTILINE)
_NOISE = re.compile(r"static assertion failed(?: due to requirement '.*')?: | \[-W[^]]*\]$")
_NUMBER = re.compile(r"__attribute__\(\(address_space\((\d)\)\)\)|address space '(\d)'")
_OBJECT = re.compile(r"'this' argument to member function .* has type '.*(device|threadgroup)|cannot initialize object")
_REASON = re.compile(r" not viable: (.*)")


def parse_faults(output: str, headers: str) -> list[Fault]:
    """Return the errors that clang printed.

    An error within the folder `headers` gets the line of the source that uses the header.
    """
    errors = [each for each in _DIAGNOSTIC.split(output) if "error: " in each.split("\n", 1)[0]]
    return [_parse_fault(error, headers) for error in errors if not _is_struct_copy(error)]


def _parse_fault(error: str, headers: str) -> Fault:
    places = _PLACE.findall(error)
    where = next((place for place in places if not place.startswith(headers)), places[0])
    message = _NOISE.sub("", error.split("\n", 1)[0].split("error: ", 1)[1])
    if _OBJECT.match(message):
        message = f"a member function is called on what does not lie in thread memory, copy that first: {message}"
    elif message.startswith("no matching") and (reason := _REASON.search(error)):
        message = f"{message}: {reason[1]}"
    named = _NUMBER.sub(lambda number: SPACES[number[1] or number[2]], message)
    return where, named.replace("generic address space", "thread")


def _is_struct_copy(error: str) -> bool:
    """Return whether an error is about copying to a struct in device or threadgroup memory, which Metal allows."""
    return "no viable overloaded '='" in error and "'this' object is in address space" in error

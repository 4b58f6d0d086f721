"""Random JSON schemas, and the length of the longest text without white space that one accepts."""

from __future__ import annotations

import json
import random
from typing import Any

Schema = dict[str, Any]
LONGEST_CHARACTER = 12  # bytes: the escapes of a surrogate pair
FORMATS = {"date": 10, "uuid": 36, "ipv4": 15}  # with the length of their longest text
WORDS = ("a", "b", "name", "größe", "x y", 'q"', "n\\")
PATTERNS = {"^[a-z]{1,4}$": 4, "^[0-9]{2}-[A-F]$": 4, "^(yes|no)$": 3}


def make_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Return a random schema, which accepts no text that is longer than `find_longest` says."""
    schema = _make_part(rng, depth)
    if rng.random() < 0.2:  # the same by a reference
        return {"$defs": {"part": schema}, "$ref": "#/$defs/part"}
    return schema


def _make_part(rng: random.Random, depth: int) -> Schema:
    kinds = ["integer", "boolean", "null", "enum", "const", "string", "pattern", "format", "type list"]
    kinds += ["array", "tuple", "object", "object", "anyOf"] * (depth > 0)
    match rng.choice(kinds):
        case "integer":
            low = rng.randrange(-2000, 2000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 1, 9, 5000])}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, ["x"], {"k": 1}], rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice([*WORDS, 7, [1, "z"]])}
        case "string":
            least = rng.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(5)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice([*PATTERNS])}
        case "format":
            return {"type": "string", "format": rng.choice([*FORMATS])}
        case "type list":
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 10 ** rng.randrange(5)}
        case "array":
            least = rng.randrange(2)
            items = _make_part(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randrange(3)}
        case "tuple":
            parts = [_make_part(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        case "anyOf":
            return {"anyOf": [_make_part(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(WORDS, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _make_part(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def find_longest(schema: Schema) -> int:
    """Return the most bytes of a text that the schema accepts, without white space."""
    match schema:
        case {"$ref": _, "$defs": {"part": part}}:
            return find_longest(part)
        case {"anyOf": parts}:
            return max(map(find_longest, parts))
        case {"enum": values}:
            return max(map(_measure, values))
        case {"const": value}:
            return _measure(value)
        case {"minimum": low, "maximum": high}:
            return max(len(str(low)), len(str(high)), len("null"), len("-0"))
        case {"type": "boolean" | "null"}:
            return len("false")
        case {"maxLength": most}:
            return 2 + most * LONGEST_CHARACTER
        case {"pattern": pattern}:
            return 2 + PATTERNS[pattern] * LONGEST_CHARACTER
        case {"format": kind}:
            return 2 + FORMATS[kind] * LONGEST_CHARACTER
        case {"prefixItems": parts}:
            return 2 + sum(find_longest(part) + 1 for part in parts)
        case {"items": items, "maxItems": most}:
            return 2 + most * (find_longest(items) + 1)
        case {"properties": parts}:
            return 2 + sum(_measure(name) + find_longest(part) + 2 for name, part in parts.items())
    raise AssertionError(f"a schema of a kind that is not made here: {schema}")


def _measure(value: Any) -> int:
    """Return the most bytes of a value's text: each character of a string may be escaped."""
    return len(json.dumps(value, ensure_ascii=False)) * LONGEST_CHARACTER

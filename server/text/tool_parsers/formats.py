"""The families of models by how they write tool calls, and which one a chat template belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from server.text.tool_parsers.families.json_calls import JSON_FORMATS
from server.text.tool_parsers.families.notations import NOTATION_FORMATS
from server.text.tool_parsers.families.tags import TAG_FORMATS
from server.text.tool_parsers.tool_format import ToolFormat

# The first whose texts are in a chat template is that template's
TOOL_FORMATS = (*TAG_FORMATS, *NOTATION_FORMATS, *JSON_FORMATS)


@cache
def list_tool_formats() -> Mapping[str, ToolFormat]:
    """Return the rows by name, and by their other names."""
    return {name: row for row in TOOL_FORMATS for name in (row.name, *row.aliases)}


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the row of a chat template, given as source text; None if it shows no known way to write tool calls."""
    return next(
        (row for row in TOOL_FORMATS if any(all(text in template for text in texts) for texts in row.in_template)), None
    )

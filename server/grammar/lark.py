"""Writes constraints as grammars in llguidance's dialect of Lark, the one form that the engine compiles.

Knows no tokenizer, and compiles nothing: a grammar of bad syntax passes through.
"""

from __future__ import annotations

import json
import re

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from server.grammar.constraint import ConstraintKind
from server.grammar.embedded_schemas import adapt_embedded_schemas
from server.text.errors import GrammarError, shorten_message

# Without this option, llguidance spells a text that it knows in advance with tokens of its own choice, for which it
# calls the model's tokenizer. With it, a model may draw every token that agrees with the grammar. It stands at the end,
# so that the lines of errors are those of the client's text, and overrides an option before it.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_VERBOSE_FLAG = re.compile(r"\(\?[a-zA-Z]*x")
GBNF_RULE = "::="  # occurs in every grammar of llama.cpp, and in none of Lark outside of strings


def write_lark(kind: ConstraintKind, text: str) -> str:
    """Return the Lark grammar of a constraint; of a message, llguidance's list of grammars that refer to each other.

    Raises GrammarError if the text is not of its kind's form.
    """
    match kind:
        case "json_schema":
            return f"start: %json {text}{OPTIONS}"
        case "regex":
            return f"start: TEXT\nTEXT: /{_to_lark_regex(text)}/{OPTIONS}"
        case "choice":
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return f"start: TEXT\nTEXT: {texts}{OPTIONS}"  # a token of Lark: as rules, many choices would be slow
        case "grammar":
            return (_convert_gbnf(text) if GBNF_RULE in text else adapt_embedded_schemas(text)) + OPTIONS
        case "lark":
            return text + OPTIONS
        case "message":
            frame, *content = json.loads(text)
            grammars = {"message": frame + OPTIONS, "content": write_lark(*content)}
            listed = [{"name": name, "lark_grammar": lark} for name, lark in grammars.items()]
            return json.dumps({"grammars": listed}, ensure_ascii=False)


def _to_lark_regex(regex: str) -> str:
    """Return a regular expression as it is written between slashes; \\d stands for ASCII digits only.

    Raises GrammarError for one that the converter would change: at the end it drops a single backslash, and it writes
    the line feeds that end comments (flag x) as escape sequences, which end none.
    """
    if "\n" in regex and "#" in regex and _VERBOSE_FLAG.search(regex):
        raise GrammarError("a regular expression is not supported: it may have comments of several lines (flag x)")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise GrammarError("a regular expression is not supported: it ends with a single backslash")
    return str(regex_to_lark(regex, use_ascii="d"))


def _convert_gbnf(text: str) -> str:
    """Return the Lark grammar of llama.cpp's GBNF. Raises GrammarError if it cannot be read."""
    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise GrammarError("the GBNF grammar is nested too deeply") from None
    except Exception as error:  # the converter raises plain Exceptions
        raise GrammarError(f"the GBNF grammar cannot be read: {shorten_message(error)}") from None

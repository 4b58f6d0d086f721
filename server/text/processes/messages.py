"""Messages between an API worker and a process that runs the model's tokenizer or checks grammars. Data only.

Messages to the process are pickled, because pickle takes all values that JSON has (also integers of any length). That
is safe: only the worker can send them. Answers are msgpack, decoded strictly, as the process runs the model's own code.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from server.grammar.constraint import ConstraintKind
from server.text.errors import ChatTemplateError, GrammarError, InfillError, TextRefused, TextTooLong, TokenizerError


class VocabularyData(msgspec.Struct, frozen=True):
    """The parts of a tokenizer that are needed to decode tokens and to find tool calls in their text."""

    tokens: list[str | None]  # text of each token, by id; None: no token has this id
    special_ids: list[int]
    decoder: str | None  # JSON text of the decoder, as in tokenizer.json
    template_source: str = ""  # source text of the chat templates, which shows how the model writes tool calls


# ---------------------------------------------------------------- to the process
class ChatDefaults(msgspec.Struct, frozen=True):
    """How conversations become prompts: the settings of the same names, of which docs/reference/settings.md tells."""

    split_special_tokens: bool = False
    default_chat_template_kwargs: dict[str, Any] = {}  # a call's own variables have precedence


class Start(msgspec.Struct, frozen=True):
    """The first message to the process: what it loads, and the limits of loading and of calls."""

    source: str | bytes  # a tokenizer's directory; or a VocabularyData, as msgpack, for whose tokens to check grammars
    seconds: float  # most CPU time of one call, in seconds; after that the kernel ends the process
    memory: int  # most bytes of memory that a call may take beyond those in use after loading
    load_memory: int  # most bytes of memory that loading may take
    load_seconds: float = 120.0  # most CPU time of loading, in seconds
    with_vocabulary: bool = False  # whether the process sends the vocabulary after loading
    stack: int = 0  # most bytes of the stack in calls; 0: as many as the system allows
    linger: float | None = None  # seconds without a call after which the process ends; None: it runs on
    chat: ChatDefaults = ChatDefaults()

    @property
    def source_name(self) -> str:
        return f"the tokenizer in {self.source}" if isinstance(self.source, str) else "the table of the tokens"


class Encode(msgspec.Struct, frozen=True):
    """Call that asks for the token ids of a text."""

    text: str
    add_special_tokens: bool


class EncodeChat(msgspec.Struct, frozen=True):
    """Call that asks for a conversation's prompt and its ids; a prompt above `max_length` characters is refused."""

    messages: list[dict[str, Any]]
    max_length: int
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


class Infill(msgspec.Struct, frozen=True):
    """Call for the ids of a fill-in-the-middle prompt: after it the model writes the text between prefix and suffix."""

    prefix: str
    suffix: str


class Decode(msgspec.Struct, frozen=True):
    """Call that asks for the text of token ids."""

    ids: list[int]
    skip_special_tokens: bool


class CheckGrammar(msgspec.Struct, frozen=True):
    """Call that checks a constraint (see `Constraint`), and asks for its Lark grammar."""

    kind: ConstraintKind
    text: str


Call: TypeAlias = Encode | EncodeChat | Infill | Decode | CheckGrammar


# ---------------------------------------------------------------- from the process
class TokenizerLoaded(msgspec.Struct, tag=True, frozen=True):
    """The first answer of a process that has loaded, with the vocabulary if Start asked for it."""

    vocabulary: VocabularyData | None


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The only answer of a process that cannot use the model's files, with the reason."""

    message: str


class Encoded(msgspec.Struct, tag=True, frozen=True):
    """The result of a call: ids for Encode and Infill, a text for Decode and CheckGrammar, both for EncodeChat."""

    ids: list[int] = []
    text: str = ""


RefusalKind: TypeAlias = Literal["template", "length", "infill", "grammar", "tokenizer", "memory"]
# Exception that the worker raises for each kind of refusal; none for "memory", after which the process ends
REFUSAL_ERRORS: dict[RefusalKind, type[TextRefused]] = {
    "template": ChatTemplateError,
    "length": TextTooLong,
    "infill": InfillError,
    "grammar": GrammarError,
    "tokenizer": TokenizerError,
}


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The reason why a call has no result. A refusal of the kind "memory" is the process's last message."""

    kind: RefusalKind
    message: str


Answer: TypeAlias = Encoded | Refused
ProcessMessage: TypeAlias = TokenizerLoaded | Broken | Encoded | Refused

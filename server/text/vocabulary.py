"""Decoding: the part of a tokenizer that each API worker has in its own process, as it decodes at every step.

It is a table from ids to tokens, and the tokenizer's decoder. The decoder comes with the model, so only kinds whose
work is proportional to the text are accepted. Does not encode, and does not read files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import tokenizers

from config.errors import SettingsError
from server.text.errors import wrap_tokenizer_error
from server.text.processes.messages import VocabularyData

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token for one byte, in vocabularies with byte fallback


def make_piece_reader(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return a function from a token's piece to its bytes, for the `decoder` of a tokenizer.json."""
    steps = flatten_steps(decoder)
    kinds = {step["type"] for step in steps}
    replaced = [pair for step in steps if (pair := _replacement(step))]
    alphabet = _make_byte_alphabet() if "ByteLevel" in kinds else {}

    def read(piece: str) -> bytes:
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        # The tokens added to a vocabulary may have characters outside of the byte alphabet.
        if alphabet and all(char in alphabet for char in piece):
            return bytes(alphabet[char] for char in piece)
        for old, new in replaced:
            piece = piece.replace(old, new)
        return piece.encode()

    return read


def format_token_bytes(data: bytes) -> str:
    """Return bytes as text; if they are not UTF-8, as OpenAI does: "bytes:" and \\xe2 for each beyond ASCII."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode("ascii", "backslashreplace")


def flatten_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder's JSON description as a flat list, without nested sequences."""
    if decoder is None:
        return []
    return (
        [step for part in decoder["decoders"] for step in flatten_steps(part)] if "decoders" in decoder else [decoder]
    )


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return the text that a decoder step replaces and the text it writes instead; None if it replaces nothing."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
        case {"type": "Metaspace", "replacement": str(old)}:
            return old, " "
        case {"type": "BPEDecoder", "suffix": str(old)}:
            return old, " "
    return None


def _make_byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet, character to byte: printable Latin-1 stays, other bytes are characters from U+0100."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


MAX_VOCAB_SIZE = 2**23  # most token ids; the largest vocabularies have a few hundred thousand
MAX_TOKEN_LENGTH = 2**13  # characters
MAX_DECODER_STEPS = 16
MAX_GROWTH = 64  # a decoded text may be at most this many times longer than its tokens together
# Decoder steps whose work is proportional to the text.
LINEAR = frozenset({"ByteFallback", "ByteLevel", "BPEDecoder", "CTC", "Fuse", "Metaspace", "Strip", "WordPiece"})


def extract_vocabulary(backend: tokenizers.Tokenizer) -> VocabularyData:
    """Return the tokens and the decoder, which decoding needs. Raises SettingsError if either is too large or slow."""
    vocab_size = max(backend.get_vocab().values(), default=-1) + 1
    if vocab_size > MAX_VOCAB_SIZE:
        raise SettingsError(
            f"model: its tokenizer has the token id {vocab_size - 1}; ids should be below {MAX_VOCAB_SIZE}"
        )
    tokens = [backend.id_to_token(token) for token in range(vocab_size)]
    if (longest := max((len(token) for token in tokens if token), default=0)) > MAX_TOKEN_LENGTH:
        raise SettingsError(
            f"model: its tokenizer has a token of {longest} characters; at most {MAX_TOKEN_LENGTH} are allowed"
        )
    spelled = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special = [index for index, token in enumerate(tokens) if token in spelled]
    decoder = backend.decoder.__getstate__().decode() if backend.decoder else None
    check_decoder(_parse_decoder(decoder))
    return VocabularyData(tokens, special, decoder)


def check_decoder(decoder: dict[str, Any] | None) -> None:
    """Raise SettingsError for a decoder whose work may grow faster than the text."""
    steps = flatten_steps(decoder)
    if len(steps) > MAX_DECODER_STEPS:
        raise SettingsError(
            f"model: its tokenizer's decoder has {len(steps)} steps; at most {MAX_DECODER_STEPS} are allowed"
        )
    growth = 1.0
    for step in steps:
        growth *= _compute_growth(step)
    if growth > MAX_GROWTH:
        raise SettingsError(f"model: its tokenizer's decoder makes texts more than {MAX_GROWTH} times longer")


def _compute_growth(step: dict[str, Any]) -> float:
    """Return the largest factor by which a decoder step can lengthen a text. Raises SettingsError if there is none."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return max(1.0, len(new.encode()) / len(old.encode()) if old else 1.0 + len(new.encode()))
        case {"type": "BPEDecoder" | "CTC"}:  # these steps may add a space for each token
            return 2.0
        case {"type": kind} if kind in LINEAR:
            return 1.0
    raise SettingsError(
        f"model: its tokenizer's decoder has a step {step.get('type')!r} that may take any time (a regular expression, "
        "or an unknown kind); replace it in tokenizer.json by one with a string"
    )


class Vocabulary:
    """The decoding half of a tokenizer, built from the result of `extract_vocabulary`."""

    def __init__(self, data: VocabularyData) -> None:
        """Build the table of tokens by id, and the decoder. Raises SettingsError if `check_decoder` refuses it."""
        decoder = _parse_decoder(data.decoder)
        check_decoder(decoder)
        self._decoder = None if decoder is None else _make_decoder(decoder)
        self._piece_to_bytes = make_piece_reader(decoder)
        self._data = data
        self.template_source = data.template_source
        self._tokens = data.tokens
        self._special = frozenset(data.special_ids)
        self._visible_tokens = [None if token in self._special else text for token, text in enumerate(data.tokens)]

    def with_visible(self, texts: Collection[str]) -> Vocabulary:
        """Return a vocabulary in which the special tokens with these texts are not special, so that they have text."""
        special = [token for token in self._data.special_ids if self._data.tokens[token] not in texts]
        return Vocabulary(msgspec.structs.replace(self._data, special_ids=special))

    def find_special_token(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none."""
        return next((token for token in self._data.special_ids if self._data.tokens[token] == text), None)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens; the model's embedding may have more rows."""
        return sum(token is not None for token in self._tokens)

    @property
    def num_ids(self) -> int:
        """The number of token ids, including those that no token has."""
        return len(self._tokens)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        return self._special

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a few ids; with `skip_special_tokens`, special tokens have none.

        Ids that are not in the vocabulary have no text. Raises TokenizerError if the model's decoder fails.
        """
        table = self._visible_tokens if skip_special_tokens else self._tokens
        end = len(table)
        pieces = [piece for token in ids if 0 <= token < end and (piece := table[token]) is not None]
        if self._decoder is None:
            return " ".join(pieces)
        try:
            return str(self._decoder.decode(pieces))
        except BaseException as error:
            raise wrap_tokenizer_error(error, "the model's tokenizer cannot decode these tokens") from None

    def has_text(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """Return whether a token has text: not if it is outside of the vocabulary, or special and to be skipped."""
        table = self._visible_tokens if skip_special_tokens else self._tokens
        return 0 <= token < len(table) and table[token] is not None

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary writes it, such as "\u0120hello"; empty for an id that is not a token."""
        return (self._tokens[token] or "") if 0 <= token < len(self._tokens) else ""

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that one token adds to a text, maybe only part of a character.

        The tokens of a text together give its bytes, and those that the tokenizer adds: special tokens, and the space
        that SentencePiece puts before a text (and that decoding removes again).
        """
        piece = self.piece(token)
        return piece.encode() if token in self._special else self._piece_to_bytes(piece)

    def token_string(self, token: int) -> str:
        """Return a token as OpenAI writes it: text, or "bytes:\\xe2\\x80" if it is only a part of a character."""
        return format_token_bytes(self.token_bytes(token))


def _parse_decoder(decoder: str | None) -> dict[str, Any] | None:
    return None if decoder is None else dict(json.loads(decoder))


def _make_decoder(described: dict[str, Any]) -> Any:
    """Return the tokenizers library's decoder object, which it makes only as a part of a tokenizer."""
    empty = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    return tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": empty, "decoder": described})).decoder

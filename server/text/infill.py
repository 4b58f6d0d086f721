"""Fill in the middle: the prompt for a text between a prefix and a suffix, for models that were trained for it.

Such models have tokens of their own for it, by which they are known here. Knows neither requests nor models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.text.errors import InfillError

if TYPE_CHECKING:
    from server.text.encoder import Encoder

PREFIX, SUFFIX = "{prefix}", "{suffix}"

FORMS = (  # what stands before, between and behind
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite, StableCode
    ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", PREFIX, "<|code_suffix|>", SUFFIX, "<|code_middle|>"),  # GLM
    (
        "<\uff5cfim\u2581begin\uff5c>",
        PREFIX,
        "<\uff5cfim\u2581hole\uff5c>",
        SUFFIX,
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
    ("\u2581<PRE>", PREFIX, "\u2581<SUF>", SUFFIX, "\u2581<MID>"),  # Code Llama
    ("<PRE>", PREFIX, "<SUF>", SUFFIX, "<MID>"),
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)


def infill_prompt(encoder: Encoder, prefix: str, suffix: str) -> list[int]:
    """Return the prompt after which the model writes what stands between the two. Raises InfillError."""
    for form in FORMS:
        if marks := _marks(encoder, form):
            break
    else:
        raise InfillError("the model has no tokens to fill in the middle: leave suffix out, or use a model for code")
    before = encoder.encode(prefix, add_special_tokens=False)
    parts = marks | {PREFIX: before, SUFFIX: _went_on(encoder, suffix)}
    return _beginning(encoder) + [token for part in form for token in parts[part]]


def _marks(encoder: Encoder, form: tuple[str, ...]) -> dict[str, list[int]]:
    """Return the ids of a form's tokens; empty if one is missing."""
    marks = [part for part in form if part not in (PREFIX, SUFFIX)]
    ids = {mark: [token] for mark in marks if (token := encoder.backend.token_to_id(mark)) is not None}
    return ids if len(ids) == len(marks) else {}


def _beginning(encoder: Encoder) -> list[int]:
    """Return the special tokens before every text."""
    plain, whole = [encoder.encode("a", add_special_tokens=special) for special in (False, True)]
    return whole[: next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)]


def _went_on(encoder: Encoder, text: str) -> list[int]:
    """Return the ids of a text at which none begins: SentencePiece would put a space before it."""
    ids, before = [encoder.encode(said, add_special_tokens=False) for said in (text, "\n")]
    if not before or not encoder.vocabulary.token_bytes(before[0]).startswith(b" "):
        return ids
    behind = encoder.encode("\n" + text, add_special_tokens=False)
    return behind[len(before) :] if behind[: len(before)] == before else ids

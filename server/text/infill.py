"""Fill in the middle: the prompt for a text between a prefix and a suffix, for models that were trained for it.

Such models have tokens of their own for it, by which they are known here. Knows neither requests nor models.
"""

from __future__ import annotations

from server.text.tokenizer import Tokenizer

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


class InfillError(Exception):
    """The model cannot do it; tells the client so."""


async def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """The prompt after which the model writes what stands between the two. Raises InfillError."""
    for form in FORMS:
        if marks := _marks(tokenizer, form):
            break
    else:
        raise InfillError("the model has no tokens to fill in the middle: leave suffix out, or use a model for code")
    before = await tokenizer.encode(prefix, add_special_tokens=False)
    parts = marks | {PREFIX: before, SUFFIX: await _went_on(tokenizer, suffix)}
    return await _beginning(tokenizer) + [token for part in form for token in parts[part]]


def _marks(tokenizer: Tokenizer, form: tuple[str, ...]) -> dict[str, list[int]]:
    """The ids of a form's tokens; empty if one is missing."""
    marks = [part for part in form if part not in (PREFIX, SUFFIX)]
    ids = {mark: [token] for mark in marks if (token := tokenizer.backend.token_to_id(mark)) is not None}
    return ids if len(ids) == len(marks) else {}


async def _beginning(tokenizer: Tokenizer) -> list[int]:
    """The special tokens before every text."""
    plain, whole = [await tokenizer.encode("a", add_special_tokens=special) for special in (False, True)]
    return whole[: next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)]


async def _went_on(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text at which none begins: SentencePiece would put a space before it."""
    ids, before = [await tokenizer.encode(said, add_special_tokens=False) for said in (text, "\n")]
    if not before or not tokenizer.token_bytes(before[0]).startswith(b" "):
        return ids
    behind = await tokenizer.encode("\n" + text, add_special_tokens=False)
    return behind[len(before) :] if behind[: len(before)] == before else ids

"""Writes log-probabilities as OpenAI's two endpoints and vLLM do. Knows tokens and scores, but no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from server.engine.ipc.messages import TokenLogprob
from server.text.output import OutputToken
from server.text.vocabulary import Vocabulary


def format_token_id(token: int) -> str:
    """Return a token's name, such as "token_id:123", for requests with `return_tokens_as_token_ids`, as in vLLM."""
    return f"token_id:{token}"


# ---------------------------------------------------------------- completions
class CompletionLogprobs(Struct):
    """OpenAI's log-probabilities of a completion: four lists with one item for each token.

    A token that is only a part of a character is named "bytes:\\xe2".
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def concat_logprobs(one: CompletionLogprobs, other: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenate the log-probabilities of one text and of the text after it."""
    return CompletionLogprobs(
        one.tokens + other.tokens,
        one.token_logprobs + other.token_logprobs,
        one.top_logprobs + other.top_logprobs,
        one.text_offset + other.text_offset,
    )


def make_completion_logprobs(
    get_name: Callable[[int], str],
    tokens: Sequence[OutputToken],
    scores: Sequence[TokenLogprob | None],
    top: int,
    base: int = 0,
) -> CompletionLogprobs:
    """Return the log-probabilities of the tokens whose text is shown, not cut off by a stop string.

    `get_name` names a token; `base` is the offset, in characters, of their text in the choice's text. Only the
    first token may have None as its score. The token itself is always among the alternatives, so that there may be one
    more than `top`.
    """
    shown = [(placed, score) for placed, score in zip(tokens, scores, strict=True) if placed.shown]
    return CompletionLogprobs(
        [get_name(placed.token) for placed, _ in shown],
        [score.logprob if score else None for _, score in shown],
        [_make_top_logprobs(get_name, score, top) if score else None for _, score in shown],
        [base + placed.offset for placed, _ in shown],
    )


def _make_top_logprobs(get_name: Callable[[int], str], score: TokenLogprob, top: int) -> dict[str, float]:
    """Return log-probabilities by token name; if several tokens have the same name, that of the likeliest."""
    alternatives = [*score.top_logprobs[:top], (score.token, score.logprob)]
    found: dict[str, float] = {}
    for token, logprob in sorted(alternatives, key=lambda pair: -pair[1]):
        found.setdefault(get_name(token), logprob)
    return found


# ---------------------------------------------------------------- chats
class Alternative(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    content: list[ChatToken]
    refusal: None = None


def make_chat_logprobs(
    tokenizer: Vocabulary,
    tokens: Sequence[OutputToken],
    scores: Sequence[TokenLogprob],
    top: int,
    *,
    by_id: bool = False,
) -> ChatLogprobs:
    def alternative(token: int, logprob: float) -> Alternative:
        name = format_token_id(token) if by_id else _decode_token(tokenizer, token)
        return Alternative(name, logprob, list(tokenizer.token_bytes(token)))

    content = []
    for score in (score for placed, score in zip(tokens, scores, strict=True) if placed.shown):
        own = alternative(score.token, score.logprob)
        tops = [alternative(token, logprob) for token, logprob in score.top_logprobs[:top]]
        content.append(ChatToken(own.token, own.logprob, own.bytes, tops))
    return ChatLogprobs(content)


def _decode_token(tokenizer: Vocabulary, token: int) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")


# ---------------------------------------------------------------- prompts
class PromptLogprob(Struct):
    """One of the likeliest tokens at a position of the prompt, or its actual token, as vLLM writes it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


def make_prompt_logprobs(tokenizer: Vocabulary, scores: Sequence[TokenLogprob], top: int) -> PromptLogprobs:
    """Return for each position of the prompt its log-probabilities by token id; None for the first position."""
    positions: PromptLogprobs = [None]
    for score in scores:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(score.top_logprobs[:top], 1)]
        positions.append(
            {
                str(token): PromptLogprob(logprob, rank, _decode_token(tokenizer, token))
                for token, logprob, rank in (*ranked, (score.token, score.logprob, score.rank))
            }
        )
    return positions

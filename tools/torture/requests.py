"""Draws random requests (`RequestSpec`), and options for sending them (`SendOptions`) that must not change the answer.

Everything is drawn from the caller's random generator, so that a seed repeats it. Knows neither HTTP nor answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

MODEL = "tiny"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TENANTS = ("key-of-tenant-one", "key-of-tenant-two")  # API keys
SALTS = (None, None, "red", "blue")

Family = Literal["exact", "window", "int8"]
# The strategy instances of a family answer alike, bit for bit; the first one computes the answers to compare with.
INSTANCES: Mapping[Family, Sequence[str]] = {
    "exact": ("contiguous", "paged", "small_blocks", "sliding_window"),
    "window": ("window",),
    "int8": ("int8",),
}
FAMILIES: Sequence[Family] = ("exact", "exact", "exact", "exact", "window", "int8")

STOPS = (" the", " and", ".", "he", "zebra")
WORDS = ("once", "upon", "a", "time", "there", "was", "little", "girl", "big", "forest", "dog", "had", "red", "ball")


@dataclass(frozen=True)
class RequestSpec:
    """The part of a request that determines its answer."""

    name: str
    path: str
    family: Family
    body: Mapping[str, Any]

    @property
    def sequences(self) -> int:
        """Return the number of sequences that the engine generates for it: prompts times choices."""
        prompt = self.body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else 1
        return prompts * int(self.body.get("best_of", self.body.get("n", 1)))

    @property
    def streamable(self) -> bool:
        return "best_of" not in self.body


@dataclass(frozen=True)
class SendOptions:
    """The options with which a request is sent: they must not change its answer."""

    instance: str  # strategy instance
    api_key: str = TENANTS[0]
    stream: bool = False
    leave_after: int | None = None  # events of a stream after which the client disconnects; None: never
    leave_seconds: float | None = None  # seconds after which the client of a whole answer disconnects; None: never
    named_by: Literal["body", "header", "model"] = "body"  # where the request names the instance
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # further fields of the body

    @property
    def leaves(self) -> bool:
        return self.leave_after is not None or self.leave_seconds is not None


# ---------------------------------------------------------------- requests
def draw_specs(draw: Random, number: int) -> list[RequestSpec]:
    """Return `number` random requests of all kinds; many prompts share a prefix."""
    texts = [_draw_ids(draw, length) for length in (64, 160, 256)]
    return [_draw_spec(draw, f"request {i}", texts) for i in range(number)]


def make_fresh_spec(draw: Random, name: str) -> RequestSpec:
    """Return a greedy request whose prompt was never sent before."""
    body = {
        "prompt": _draw_ids(draw, 120),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return RequestSpec(name, COMPLETIONS, "exact", body)


def _draw_spec(draw: Random, name: str, texts: Sequence[list[int]]) -> RequestSpec:
    family = draw.choice(FAMILIES)
    body = _draw_length(draw) | _draw_sampling(draw) | {"return_token_ids": True}
    if draw.random() < 0.3:
        return RequestSpec(name, CHATS, family, body | _draw_chat(draw))
    return RequestSpec(name, COMPLETIONS, family, body | _draw_completion(draw, texts, body))


def _draw_length(draw: Random) -> dict[str, Any]:
    """Return random fields of a request that say where its text ends: max_tokens, ignore_eos, stop, min_tokens."""
    max_tokens = draw.choice((1, 8, 20, 20, 40, 120))
    fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": draw.random() < 0.8}
    if draw.random() < 0.3:
        fields["stop"] = draw.sample(STOPS, draw.randint(1, 2))
        fields |= {"include_stop_str_in_output": True} if draw.random() < 0.3 else {}
    if draw.random() < 0.1:
        fields["min_tokens"] = max_tokens // 2
    return fields


def _draw_sampling(draw: Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {"temperature": 0} | _draw_penalties(draw)
    fields: dict[str, Any] = {"temperature": draw.choice((0.5, 1.0, 1.5)), "seed": draw.randrange(2**31)}
    fields |= draw.choice(({}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8}))
    fields |= {"n": draw.choice((2, 3, 4))} if draw.random() < 0.3 else {}
    return fields | _draw_penalties(draw)


def _draw_penalties(draw: Random) -> dict[str, Any]:
    if draw.random() < 0.7:
        return {}
    return draw.choice(
        (
            {"repetition_penalty": 1.3},
            {"frequency_penalty": 0.7},
            {"presence_penalty": 0.5},
            {"logit_bias": {str(draw.randrange(300)): draw.uniform(-5, 5) for _ in range(3)}},
        )
    )


def _draw_completion(draw: Random, texts: Sequence[list[int]], body: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt": _draw_prompt(draw, texts)}
    if draw.random() < 0.1:
        fields["prompt"] = [_draw_prompt_ids(draw, texts) for _ in range(2)]
    if draw.random() < 0.3:
        fields["logprobs"] = draw.randint(0, 3)
    if draw.random() < 0.1:
        fields |= draw.choice(({"echo": True}, {"prompt_logprobs": 1}))
    if "n" in body and draw.random() < 0.2:
        fields["best_of"] = body["n"] + 1
    return fields


def _draw_chat(draw: Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": _draw_sentence(draw, draw.choice((3, 12, 40)))}]
    if draw.random() < 0.6:
        messages.insert(0, {"role": "system", "content": "You tell short stories of " + " ".join(WORDS)})
    fields: dict[str, Any] = {"messages": messages}
    if draw.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": draw.randint(0, 3)}
    return fields


def _draw_prompt(draw: Random, texts: Sequence[list[int]]) -> str | list[int]:
    return _draw_sentence(draw, draw.randint(2, 30)) if draw.random() < 0.3 else _draw_prompt_ids(draw, texts)


def _draw_prompt_ids(draw: Random, texts: Sequence[list[int]]) -> list[int]:
    """Return a prompt as ids: a prefix of a shared text, and random ids."""
    text = draw.choice(texts)
    return text[: draw.choice((8, 33, len(text)))] + _draw_ids(draw, draw.choice((0, 5, 40)))


def _draw_ids(draw: Random, length: int) -> list[int]:
    return [draw.randrange(2, 300) for _ in range(length)]


def _draw_sentence(draw: Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


# ---------------------------------------------------------------- send options
def make_reference_options(spec: RequestSpec) -> SendOptions:
    """Return the options for the expected answer: not streamed, no prefix cache, the first instance of the family."""
    return SendOptions(INSTANCES[spec.family][0], extra_body={"skip_reading_prefix_cache": True})


def draw_send_options(draw: Random, spec: RequestSpec) -> SendOptions:
    """Return random options for sending a request."""
    stream = spec.streamable and draw.random() < 0.5
    leaves = draw.random() < 0.2
    return SendOptions(
        instance=draw.choice(INSTANCES[spec.family]),
        api_key=draw.choice(TENANTS),
        stream=stream,
        leave_after=draw.choice((0, 1, 3, 10)) if leaves and stream else None,
        leave_seconds=draw.choice((0.0, 0.01, 0.1)) if leaves and not stream else None,
        named_by=draw.choice(("body", "header", "model")),
        extra_body=_draw_extra_body(draw, stream),
    )


def _draw_extra_body(draw: Random, stream: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"priority": draw.randrange(3)}
    if (salt := draw.choice(SALTS)) is not None:
        fields["cache_salt"] = salt
    if stream and draw.random() < 0.5:
        fields["stream_options"] = {"include_usage": True}
    for chance, field_of_body in (
        (0.1, {"skip_reading_prefix_cache": True}),
        (0.2, {"explain": True}),
        (0.2, {"kv_cache_priority": draw.randrange(101)}),
        (0.1, {"kv_cache_ttl": 5.0}),
        (0.2, {"speculative_config": {"num_speculative_tokens": draw.randint(1, 6)}}),
    ):
        fields |= field_of_body if draw.random() < chance else {}
    return fields

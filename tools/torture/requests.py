"""Draws random requests (`RequestSpec`), and options for sending them (`SendOptions`) that must not change the answer.

Everything is drawn from the caller's random generator, so that a seed repeats it. Knows no answers.
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

# ---------------------------------------------------------------- fields of bodies
Fields = Mapping[str, Any]
Choices = Sequence[tuple[float, Sequence[Fields]]]  # each: the chance that one of the alternatives is drawn

LENGTHS: Choices = (
    (1.0, [{"max_tokens": number} for number in (1, 8, 20, 20, 40, 120)] + [{"max_tokens": 40, "min_tokens": 20}]),
    (0.8, [{"ignore_eos": True}]),
    (0.2, [{"stop": [" the"]}, {"stop": [" and", "."]}, {"stop": ["he", "zebra"]}]),
    (0.1, [{"stop": ["he", "."], "include_stop_str_in_output": True}]),
)
GREEDY: Choices = ((1.0, [{"temperature": 0}]),)
SAMPLING: Choices = (
    (1.0, [{"temperature": value} for value in (0.5, 1.0, 1.5)]),
    (1.0, [{"seed": seed} for seed in range(1000)]),
    (0.8, [{"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8}]),
    (0.3, [{"n": number} for number in (2, 3, 4)]),
)
LOGIT_BIAS = {"20": -5.0, "130": 5.0, "250": 2.5}
PENALTIES: Choices = (
    (0.1, [{"repetition_penalty": 1.3}, {"logit_bias": LOGIT_BIAS}]),
    (0.2, [{"frequency_penalty": 0.7}, {"presence_penalty": 0.5}]),
)
COMPLETION: Choices = (
    (0.3, [{"logprobs": number} for number in range(4)]),
    (0.1, [{"echo": True}, {"prompt_logprobs": 1}]),
)
CHAT: Choices = ((0.3, [{"logprobs": True, "top_logprobs": number} for number in range(4)]),)
# fields that do not change the answer
EXTRA: Choices = (
    (1.0, [{"priority": number} for number in range(3)]),
    (0.5, [{"cache_salt": salt} for salt in SALTS if salt is not None]),
    (0.1, [{"skip_reading_prefix_cache": True}]),
    (0.2, [{"explain": True}]),
    (0.2, [{"kv_cache_priority": number} for number in range(101)]),
    (0.1, [{"kv_cache_ttl": 5.0}]),
    (0.2, [{"speculative_config": {"num_speculative_tokens": number}} for number in range(1, 7)]),
)
USAGE: Choices = ((0.5, [{"stream_options": {"include_usage": True}}]),)
WORDS = ("once", "upon", "a", "time", "there", "was", "little", "girl", "big", "forest", "dog", "had", "red", "ball")


@dataclass(frozen=True)
class RequestSpec:
    """The part of a request that determines its answer."""

    name: str
    path: str
    family: Family
    body: Fields


@dataclass(frozen=True)
class SendOptions:
    """The options with which a request is sent: they must not change its answer."""

    instance: str  # strategy instance
    api_key: str = TENANTS[0]
    stream: bool = False
    leave_seconds: float | None = None  # after which the client disconnects; None: never
    named_by: Literal["body", "header", "model"] = "body"  # where the request names the instance
    extra_body: Fields = field(default_factory=dict)  # further fields of the body


# ---------------------------------------------------------------- requests
def draw_specs(draw: Random, number: int) -> list[RequestSpec]:
    """Return `number` random requests of all kinds; many prompts share a prefix."""
    texts = [_draw_ids(draw, length) for length in (64, 160, 256)]
    return [_draw_spec(draw, f"request {i}", texts) for i in range(number)]


def make_fresh_spec(draw: Random, name: str) -> RequestSpec:
    """Return a greedy request whose prompt was never sent before."""
    body = {"prompt": _draw_ids(draw, 120), "max_tokens": 4, "temperature": 0}
    return RequestSpec(name, COMPLETIONS, "exact", body | {"ignore_eos": True, "return_token_ids": True})


def _draw_spec(draw: Random, name: str, texts: Sequence[list[int]]) -> RequestSpec:
    family = draw.choice(FAMILIES)
    sampling = draw.choice((GREEDY, SAMPLING))
    body = _draw_fields(draw, (*LENGTHS, *sampling, *PENALTIES)) | {"return_token_ids": True}
    if draw.random() < 0.3:
        return RequestSpec(name, CHATS, family, body | _draw_chat(draw))
    body |= {"prompt": _draw_prompt(draw, texts)} | _draw_fields(draw, COMPLETION)
    if "n" in body and draw.random() < 0.2:
        body["best_of"] = body["n"] + 1
    return RequestSpec(name, COMPLETIONS, family, body)


def _draw_fields(draw: Random, choices: Choices) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for chance, alternatives in choices:
        fields |= draw.choice(alternatives) if draw.random() < chance else {}
    return fields


def _draw_chat(draw: Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": _draw_sentence(draw, draw.choice((3, 12, 40)))}]
    if draw.random() < 0.6:
        messages.insert(0, {"role": "system", "content": "You tell short stories of " + " ".join(WORDS)})
    return {"messages": messages} | _draw_fields(draw, CHAT)


def _draw_prompt(draw: Random, texts: Sequence[list[int]]) -> str | list[int] | list[list[int]]:
    """Return a text, one prompt as ids, or two of these: a prefix of a shared text, and random ids."""
    prompts = [draw.choice(texts)[: draw.choice((8, 33, 256))] + _draw_ids(draw, draw.choice((0, 5, 40)))]
    prompts.append(prompts[0][:8] + _draw_ids(draw, 5))
    return draw.choices((_draw_sentence(draw, draw.randint(2, 30)), prompts[0], prompts), (0.3, 0.6, 0.1))[0]


def _draw_ids(draw: Random, length: int) -> list[int]:
    return [draw.randrange(2, 300) for _ in range(length)]


def _draw_sentence(draw: Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


# ---------------------------------------------------------------- what is sent
def make_reference_options(spec: RequestSpec) -> SendOptions:
    """Return the options for the expected answer: not streamed, no prefix cache, the first instance of the family."""
    return SendOptions(INSTANCES[spec.family][0], extra_body={"skip_reading_prefix_cache": True})


def draw_send_options(draw: Random, spec: RequestSpec) -> SendOptions:
    """Return random options for sending a request."""
    stream = "best_of" not in spec.body and draw.random() < 0.5
    return SendOptions(
        instance=draw.choice(INSTANCES[spec.family]),
        api_key=draw.choice(TENANTS),
        stream=stream,
        leave_seconds=draw.choice((0.0, 0.01, 0.1, 0.3)) if draw.random() < 0.2 else None,
        named_by=draw.choice(("body", "header", "model")),
        extra_body=_draw_fields(draw, (*EXTRA, *(USAGE if stream else ()))),
    )


def make_body(spec: RequestSpec, options: SendOptions) -> dict[str, Any]:
    body = {"model": MODEL, **spec.body, **options.extra_body}
    if options.stream:
        body["stream"] = True
    if options.named_by == "body":
        body["kv_cache"] = options.instance
    elif options.named_by == "model":
        body["model"] = f"{MODEL}:{options.instance}"
    return body


def make_headers(options: SendOptions) -> dict[str, str]:
    chosen = {"X-KV-Cache": options.instance} if options.named_by == "header" else {}
    return {"Authorization": f"Bearer {options.api_key}"} | chosen

"""The key that all requests of a conversation have in common, so that a roll-out serves them under one instance.

A client names its conversation with the header X-Session-Id; otherwise the key is made of OpenAI's fields
prompt_cache_key or user, or of the prompt's beginning. The key is a hash with the tenant in it: two clients never share
one, and nothing that a client wrote reaches the engine or a log. Knows no endpoint and no roll-out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain

import msgspec

from server.api.openai.conversation import Message, iter_texts
from server.api.openai.generation_job import StrategyHints
from server.api.openai.request_models import GenerationRequest

# The length of a completion's prompt that makes its key. OpenAI routes requests by about the first 256 tokens; a prompt
# in text is cut at as many characters as these tokens have in English, since its tokens near the end may still change.
PREFIX_TOKENS = 256
PREFIX_CHARACTERS = 1024


def make_conversation_key(hints: StrategyHints, body: GenerationRequest, beginning: object) -> str:
    """Return a request's conversation key; `beginning`, any JSON value, counts if the client named no conversation."""
    given = (
        ("session", hints.session),
        ("prompt_cache_key", body.prompt_cache_key),
        ("user", body.user),
        ("beginning", beginning),
    )
    source, value = next(((source, value) for source, value in given if value), given[-1])
    return hashlib.sha256(msgspec.json.encode((hints.tenant, source, value))).hexdigest()[:16]


def get_chat_beginning(messages: Sequence[Message]) -> list[list[str]]:
    """Return role and texts of a chat's messages up to the first of the user, which later requests repeat.

    The very first message is often the same system prompt in all conversations of an application. Without a message of
    the user, only the first message counts.
    """
    first = next((index for index, message in enumerate(messages) if message.role == "user"), 0)
    return [list(chain([message.role], iter_texts([message]))) for message in messages[: first + 1]]


def get_prompt_beginning(prompt: str | list[int]) -> str | list[int]:
    """Return the beginning of a completion's prompt, which stays the same while a text grows that is longer."""
    return prompt[: PREFIX_CHARACTERS if isinstance(prompt, str) else PREFIX_TOKENS]

"""API processes whose models write tool calls and reasoning, in several families' formats; the engine is a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from server.engine.ipc.messages import Submit
from server.text.chat.template import ChatTemplate
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import Vocabulary
from tests.api.conftest import running_api
from tests.api.fake_engine import HELLO as SMALL
from tests.api.fake_engine import FakeEngine, generates
from tests.grammar.judge import GrammarJudge
from tests.patience import PATIENCE
from tests.text.tiny_tokenizers import byte_level

HELLO = msgspec.structs.replace(SMALL, max_seq_len=16384, vocab_size=512)
TEMPLATES = Path(__file__).parents[3] / "text" / "templates" / "tools"
SPECIAL = [
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
]


@dataclass(frozen=True)
class ToolServer:
    """A running API process with a model's template; its engine sends what `says` is given."""

    http: httpx.Client
    client: openai.OpenAI
    engine: FakeEngine
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocabulary: Vocabulary

    def says(self, text: str, finish_reason: str = "stop") -> None:
        """Let the model say this, one token in each message of the engine, and then end."""
        end = self.encode("<|im_end|>") if finish_reason == "stop" else []
        self.engine.begin_again(generates([*self.encode(text), *end], finish_reason))

    @property
    def prompt(self) -> str:
        """The text of the last request's prompt."""
        return self.decode(self.engine.all(Submit)[-1].prompt)

    def accepts(self, text: str) -> bool:
        """Return whether the grammar of the last request accepts a text, in the model's own tokens."""
        return self.accepts_tokens(self.encode(text))

    def accepts_tokens(self, tokens: Sequence[int]) -> bool:
        """Return whether the grammar of the last request accepts the text of these tokens."""
        return self._judge.accepts_tokens(self.engine.all(Submit)[-1].grammar, tokens)

    @cached_property
    def _judge(self) -> GrammarJudge:
        return GrammarJudge(self.vocabulary)

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]} | body)


@contextmanager
def serving_tools(template: str, tokens: Sequence[str] = (), **settings: Any) -> Iterator[ToolServer]:
    """Serve a model with the chat template of this name, in whose vocabulary the markers are special tokens.

    `tokens` are in it, too, and are not special.
    """
    backend = byte_level()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([*tokens])
    file = TEMPLATES / f"{template}.jinja"
    sources = {"default": file.read_text()} if file.exists() else {"default": template}
    tokenizer = Tokenizer(backend, ChatTemplate(sources, {"bos_token": "<s>", "eos_token": "</s>"}))
    with running_api(tokenizer, **settings) as api, FakeEngine(api.socket_path, generates([100]), HELLO) as engine:
        api.await_ready()
        with (
            httpx.Client(base_url=api.url, timeout=PATIENCE) as http,
            openai.OpenAI(base_url=f"{api.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE) as client,
        ):
            yield ToolServer(
                http,
                client,
                engine,
                lambda text: list(backend.encode(text, add_special_tokens=False).ids),
                lambda ids: str(backend.decode(list(ids), skip_special_tokens=False)),
                tokenizer,
            )


@pytest.fixture(scope="module")
def qwen() -> Iterator[ToolServer]:
    with serving_tools("qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def mistral() -> Iterator[ToolServer]:
    with serving_tools("mistral_nemo") as server:
        yield server


@pytest.fixture(scope="module")
def gpt_oss() -> Iterator[ToolServer]:
    with serving_tools("gpt_oss") as server:
        yield server

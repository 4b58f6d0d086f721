"""`kvmux serve --device metal-emulated`: over HTTP, what transformers computes, under each strategy and all at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.end_to_end.server_process import Server, serving
from tests.models.random_models import save_random_model

STRATEGIES = ("contiguous", "paged", "sliding_window")
PROMPTS = ("A text of a few words, ", "and another one: it is somewhat longer than the first.", "short")
TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def texts(directory: Path) -> list[str]:
    """What transformers writes behind each prompt."""
    model: Any = save_random_model("qwen2", directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    written = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        whole = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=1)
        written.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return written


@pytest.fixture(scope="module")
def server(directory: Path, texts: list[str]) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "32MiB", "--max-num-batched-tokens", "16")
    with serving("--model", str(directory), "--device", "metal-emulated", *flags) as server:
        yield server


def _written(server: Server, prompt: str, strategy: str) -> str:
    answer = server.complete(prompt=prompt, max_tokens=TOKENS, temperature=0, kv_cache=strategy).json()
    return str(answer["choices"][0]["text"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_writes_what_transformers_does(server: Server, texts: list[str], strategy: str) -> None:
    assert [_written(server, prompt, strategy) for prompt in PROMPTS] == texts


def test_so_do_all_at_once(server: Server, texts: list[str]) -> None:
    asked = [(prompt, strategy) for strategy in STRATEGIES for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(lambda each: _written(server, *each), asked)) == texts * len(STRATEGIES)


def test_every_operation_is_the_devices_own(server: Server) -> None:
    settings = server.get("/v1/settings").json()
    assert (settings["device"], settings["kernels"]) == ("metal-emulated", "metal-emulated")
    assert "plain torch" not in server.output.read_text()

"""A text goes on past the model's context under `streaming`, and only there: one request or many, preempted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from config.errors import SettingsError
from server.engine.info import summarize_engine
from server.engine.ipc.messages import Speculation
from tests.engine.engine_driver import Driver, least_memory, strategies
from tests.engine.expected_tokens import random_prompt
from tests.models.random_models import CONFIGS, FALLBACK, SHAPE, UNTIED, save_random_model

CONTEXT, LENGTH = 96, 300
SIZES = {"sinks": 4, "window": 50, "every": 20}
SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        streaming={"kind": "streaming", **SIZES},
        int8={"kind": "streaming", "k_dtype": "int8", "v_dtype": "int8", "block_size": 8, **SIZES},
    ),
    "max_seq_len": CONTEXT,
    "max_num_batched_tokens": 32,
}
PROMPT = random_prompt(30)


@pytest.fixture(scope="module")
def driver(tiny: Path) -> Driver:
    return Driver(tiny, **SETTINGS)


# ---------------------------------------------------------------- against transformers
def test_logits_are_those_of_transformers_over_the_tokens_that_stay(tmp_path: Path) -> None:
    """In a model of one layer the keys of a token depend on that token alone, so no cache is needed to compare with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "one_layer", LlamaConfig(**UNTIED, **SHAPE | {"num_hidden_layers": 1}))
        save_random_model("one_layer", tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    driver = Driver(tmp_path, **SETTINGS)
    found = driver.submit("it", PROMPT, LENGTH, kv_cache="streaming", logprobs=5)
    driver.run()
    text = [*PROMPT, *found.tokens]
    for end in (*range(CONTEXT - 3, CONTEXT + 24), 200, 239, 240, 241, 299, 329):
        boundary = (end - 1) // 20 * 20  # the last one before the token at `end` - 1 entered
        first = max(4, boundary - 50)
        kept = [*text[:4], *text[first:end]] if first > 4 else text[:end]
        positions = torch.arange(len(kept))[None]
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([kept]), position_ids=positions, use_cache=False).logits[0, -1]
        best = logits.log_softmax(0).topk(5)
        score = found.scores[end - len(PROMPT)]
        assert [token for token, _ in score.top_logprobs] == best.indices.tolist(), end
        torch.testing.assert_close(
            torch.tensor([value for _, value in score.top_logprobs]), best.values, rtol=0, atol=1e-4
        )


# ---------------------------------------------------------------- the same text in every way
@pytest.mark.parametrize("instance", ["streaming", "int8"])
def test_a_preempted_text_is_computed_again_to_the_same_bits(tiny: Path, instance: str) -> None:
    found = []
    for preempted_at in (None, 41, 260):
        driver = Driver(tiny, **SETTINGS)
        heard = driver.submit("it", PROMPT, LENGTH, kv_cache=instance, logprobs=3, temperature=0.8, seed=7)
        driver.submit("other", random_prompt(60, seed=5), 150, kv_cache=instance)
        while driver.core.busy:
            if preempted_at is not None and len(heard.tokens) == preempted_at:
                driver.preempt("it")
                preempted_at = None
            driver.step()
        assert len(heard.tokens) == LENGTH
        found.append((heard.tokens, heard.scores))
    assert found[0] == found[1] == found[2]


def test_texts_that_do_not_fit_together_take_turns(tiny: Path) -> None:
    settings = SETTINGS | {"strategies": strategies(streaming={"kind": "streaming", **SIZES}), "max_num_seqs": 3}
    alone = Driver(tiny, **settings)
    expected = {}
    for i in range(3):
        heard = alone.submit(str(i), random_prompt(30, seed=i), 150, kv_cache="streaming")
        alone.run()
        expected[str(i)] = heard.tokens
    driver = Driver(tiny, **settings, kv_memory=str(2 * least_memory(tiny, **settings)), kv_overcommit=4.0)
    for i in range(3):
        driver.submit(str(i), random_prompt(30, seed=i), 150, kv_cache="streaming")
    driver.run()
    assert {name: heard.tokens for name, heard in driver.heard.items()} == expected
    driver.assert_nothing_leaked()


def test_choices_fork_the_prompt_and_go_on_past_the_context(driver: Driver) -> None:
    def sampling(i: int) -> dict[str, Any]:
        return {"temperature": 0.9, "seed": i, "kv_cache": "streaming"}

    prompt = random_prompt(70, seed=3)
    for i in range(3):
        driver.submit(f"choice {i}", prompt, 150, sibling_of="choice 0" if i else None, **sampling(i))
    driver.run()
    for i in range(3):
        driver.submit("alone", prompt, 150, **sampling(i))
        driver.run()
        assert driver.heard[f"choice {i}"].tokens == driver.heard["alone"].tokens
    driver.assert_nothing_leaked()


def test_drafts_change_no_token(driver: Driver) -> None:
    plain = driver.submit("plain", [5, 6, 7] * 12, 300, kv_cache="streaming")
    driver.run()
    drafted = driver.submit("drafted", [5, 6, 7] * 12, 300, kv_cache="streaming", speculation=Speculation(4))
    driver.run()
    assert drafted.tokens == plain.tokens
    assert driver.records[-1].drafted_tokens > 0


# ---------------------------------------------------------------- limits and reports
def test_a_prompt_has_to_fit_the_context_and_is_scored_whole(driver: Driver) -> None:
    heard = driver.submit("whole", random_prompt(CONTEXT), 200, kv_cache="streaming", prompt_logprobs=0)
    driver.run()
    assert (len(heard.prompt_scores), len(heard.tokens)) == (CONTEXT - 1, 200)
    refused = driver.submit("longer", random_prompt(CONTEXT + 1), 1, kv_cache="streaming").failed
    assert refused is not None
    assert refused.code == "context_length_exceeded"


def test_other_strategies_say_which_one_would_take_it(driver: Driver) -> None:
    refused = driver.submit("it", PROMPT, CONTEXT, kv_cache="paged").failed
    assert refused is not None
    assert f"more than max_seq_len={CONTEXT}: shorten the prompt or lower max_tokens" in refused.message
    assert "a strategy with an unbounded contract bounds the prompt only" in refused.message


def test_a_text_without_an_end_is_admitted_and_can_be_cancelled(driver: Driver) -> None:
    heard = driver.submit("it", PROMPT, 2**62, kv_cache="streaming", speculation=Speculation(2))
    while len(heard.tokens) < 3 * CONTEXT:
        driver.step()
    driver.cancel("it")
    record = driver.records[-1]
    assert record.kept_tokens <= sum(SIZES.values())
    assert record.kept_tokens + record.dropped_tokens == record.prompt_tokens + record.generated_tokens - 1
    assert record.kv_bytes == driver.core.instances["streaming"].bytes_for(10**9)
    driver.assert_nothing_leaked()


def test_it_is_described(driver: Driver) -> None:
    (described,) = (d for d in summarize_engine(driver.engine)["strategies"] if d["name"] == "streaming")
    assert described["options"]["window"] == 50
    assert described["capacity_tokens"] >= CONTEXT


@pytest.mark.parametrize("name", [name for name in FALLBACK if name != "gpt_oss"])
def test_a_model_that_transformers_computes_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    with pytest.raises(SettingsError, match="kind 'streaming' rotates keys"):
        Driver(tmp_path, **SETTINGS)

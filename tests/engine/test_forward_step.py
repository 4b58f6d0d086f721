"""`forward_step` with a cache equals the whole text without one, for exact strategies and both architectures."""

from __future__ import annotations

import pytest
import torch

from server.engine.instance_reports import read_usage
from server.models.no_cache import full_context_logits
from server.sequence import CachedSequence
from tests.cache_strategies.cache_driver import find_cached
from tests.engine.engine_driver import Driver
from tests.models.random_models import save_random_model

TOKENS = 50
EXACT = {"sliding_window": {"kind": "sliding_window", "window": 512}}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    directory = tmp_path_factory.mktemp(request.param)
    save_random_model(request.param, directory)
    return Driver(directory, strategies=EXACT)


@pytest.mark.parametrize("strategy", ["contiguous", "paged", "sliding_window"])
@torch.inference_mode()
def test_fifty_tokens_and_the_last_logits_equal_full_context(driver: Driver, strategy: str) -> None:
    model = driver.core.model
    sequence = CachedSequence(driver.core.instances[strategy])
    ids = [7]
    for position in range(TOKENS):
        embedding = model.embed(torch.tensor([ids[-1]])).view(1, 1, -1)
        logits = model.forward_step(embedding, position, sequence)
        assert logits.shape == (1, 1, model.config.vocab_size)
        expected = full_context_logits(model, ids)
        assert int(logits.argmax()) == int(expected.argmax())
        ids.append(int(logits.argmax()))
    torch.testing.assert_close(logits[0, 0], expected, rtol=0, atol=1e-4)
    sequence.close()
    driver.core.instances[strategy].check_integrity()


def test_a_position_that_disagrees_with_the_cache_is_refused(driver: Driver) -> None:
    model, sequence = driver.core.model, CachedSequence(driver.core.instances["paged"])
    with pytest.raises(ValueError, match="current_pos is 3, but the cache's next token has position 0"):
        model.forward_step(torch.zeros(1, 1, model.config.hidden_size), 3, sequence)
    sequence.close()


def test_embeddings_without_a_token_are_never_shared(driver: Driver) -> None:
    model, cache = driver.core.model, driver.core.instances["paged"]
    with torch.inference_mode():
        sequence = CachedSequence(cache)
        for position in range(64):
            model.forward_step(torch.randn(1, 1, model.config.hidden_size), position, sequence)
        sequence.close()
    assert read_usage(cache).idle == 0
    assert find_cached(cache, [-1] * 64) == 0

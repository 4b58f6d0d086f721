"""Gemma 3's windows: after long prompts the server predicts what transformers predicts, under every exact strategy.

Five of six layers see the last 512 tokens only, and the others all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.end_to_end.server_process import Server
from tests.real.model_files import find_model, read_long_text
from tests.real.reference import Reference
from tests.real.serving import EXACT, list_exact, serving_every_kind, tokenize

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
TOLERANCE = 5e-3  # nats: sums over 16,000 keys in another order
TOKENS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gemma3")
    flags = (*EXACT, "--max-num-seqs", "2")
    with serving_every_kind("gemma3", folder, *flags, max_seq_len=16_640, kv_memory="4GiB") as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(find_model("gemma3"))


@pytest.mark.parametrize("length", [4_096, 16_384])
def test_predictions_after_a_long_prompt_equal_those_of_transformers(
    server: Server, reference: Reference, length: int
) -> None:
    prompt = tokenize(server, read_long_text()[: 8 * length])[:length]
    assert len(prompt) == length
    for strategy in list_exact(server):
        options = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True, "return_token_ids": True}
        answer = server.complete(prompt=prompt, kv_cache=strategy, **options)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = torch.tensor(choice["token_ids"])
        expected = reference.compute_log_probs([*prompt, *choice["token_ids"]], last=TOKENS)
        own = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(own, expected[torch.arange(TOKENS), text], atol=TOLERANCE, rtol=0, msg=strategy)
        assert (expected.amax(-1) - own < TOLERANCE).all(), "each token is the likeliest"

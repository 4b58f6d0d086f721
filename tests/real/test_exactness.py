"""A real GGUF file is served as transformers computes it, under every exact strategy, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.end_to_end.server_process import Server
from tests.real.model_files import find_model, model_params, read_texts
from tests.real.reference import Reference
from tests.real.serving import EXACT, list_exact, serving_every_kind, tokenize

pytestmark = pytest.mark.timeout(1800)
TOLERANCE = 2e-3  # nats: both compute in float32, in another order
NEAR_TIE = 0.01  # nats between the two likeliest tokens, within which rounding may decide
PROMPT_TOKENS = 192
GREEDY_TOKENS = 32


@dataclass(frozen=True)
class Both:
    """A server and the reference, of the same file."""

    server: Server
    reference: Reference
    prompts: dict[str, list[int]]  # by kind of text

    def complete(self, **body: Any) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """Complete all prompts under all exact strategies in one batch; return the choices by prompt and strategy."""
        pairs = [(kind, strategy) for kind in self.prompts for strategy in list_exact(self.server)]

        def answer(pair: tuple[str, str]) -> Any:
            given = {"prompt": self.prompts[pair[0]], "kv_cache": pair[1], "temperature": 0} | body
            answer = self.server.complete(**given, return_token_ids=True)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        with ThreadPoolExecutor(len(pairs)) as pool:
            return dict(zip(pairs, pool.map(answer, pairs), strict=True))


@pytest.fixture(scope="module", params=list(model_params()))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    name: str = request.param
    file = find_model(name)
    with serving_every_kind(name, tmp_path_factory.mktemp(name), *EXACT) as server:
        prompts = {kind: tokenize(server, text[:4000])[:PROMPT_TOKENS] for kind, text in read_texts().items()}
        yield Both(server, Reference(file), prompts)


def test_log_probabilities_of_prompts_equal_those_of_transformers(both: Both) -> None:
    assert {"paged", "contiguous", "mirrored"} <= {*list_exact(both.server)}
    expected = {
        kind: both.reference.compute_log_probs(prompt)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        for kind, prompt in both.prompts.items()
    }
    for (kind, strategy), choice in both.complete(max_tokens=1, prompt_logprobs=0).items():
        prompt, scores = both.prompts[kind], choice["prompt_logprobs"]
        own = [scores[i][str(prompt[i])]["logprob"] for i in range(1, len(prompt))]
        torch.testing.assert_close(torch.tensor(own), expected[kind], atol=TOLERANCE, rtol=0, msg=strategy)


def test_greedy_texts_equal_those_of_transformers_up_to_near_ties(both: Both) -> None:
    choices, compared = both.complete(max_tokens=GREEDY_TOKENS, ignore_eos=True), 0
    for kind, prompt in both.prompts.items():
        expected, margins = both.reference.continue_greedily(prompt, GREEDY_TOKENS)
        tie = next((i for i, margin in enumerate(margins) if margin < NEAR_TIE), len(expected))
        compared += tie
        for strategy in list_exact(both.server):
            assert choices[kind, strategy]["token_ids"][:tie] == expected[:tie], strategy
    assert compared > len(both.prompts) * GREEDY_TOKENS / 4, "nearly all texts have a tie at their beginning"

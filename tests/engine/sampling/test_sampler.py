"""Which sampled tokens count after a draft, and that the tokens are the same as without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cache_strategies.types import NO_SALT
from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.sampler import Sampler, SampleResult, SamplerInput, verify_draft
from server.engine.scheduling.request import Request
from tests.engine.scheduling.fake_caches import FakeCache, Memory

EOS = 7
DRAWS = 6000


# -------------------------------------------------------------------- which draws count
@pytest.mark.parametrize(
    ("draft", "tokens", "expected", "accepted"),
    [
        ([], [4], [4], 0),
        ([4, 5], [4, 5, 6], [4, 5, 6], 2),
        ([4, 5], [4, 6, 5], [4, 6], 1),
        ([4, 5], [6, 5, 5], [6], 0),
        ([4, EOS, 4], [4, EOS, 4, 4], [4, EOS], 1),
        ([EOS], [EOS, 4], [EOS], 0),
        ([4, 5], [4, EOS, 6], [4, EOS], 1),
    ],
)
def test_draws_count_up_to_the_first_that_differs_from_the_draft_or_ends_the_text(
    draft: list[int], tokens: list[int], expected: list[int], accepted: int
) -> None:
    found = verify_draft(draft, tokens, {EOS})
    assert found == SampleResult(expected)
    assert found.num_accepted == accepted


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([None, 5, 6], SampleResult([], is_finite=False)),
        ([4, None, 6], SampleResult([4], is_finite=False)),
        ([4, 5, None], SampleResult([4, 5], is_finite=False)),
        ([3, None, None], SampleResult([3])),
    ],
)
def test_what_is_no_number_counts_only_where_the_text_gets_to(tokens: list[int | None], expected: SampleResult) -> None:
    found = verify_draft([4, 5], tokens, {EOS})
    assert found == expected
    assert found.num_accepted <= 2


# -------------------------------------------------------------------- draws
def request(prompt: list[int], output: list[int], **sampling: object) -> Request:
    made = Request((0, "r"), [*prompt], SamplingParams(30, **sampling), FakeCache("a", Memory(1)), "", NO_SALT)  # type: ignore[arg-type]
    made.tokens += output
    made.num_output_tokens = len(output)
    return made


def logits_of(text: list[int], vocabulary: int = 12) -> Tensor:
    """Return logits [V] after a text: arbitrary numbers that depend on all of it."""
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(hash(tuple(text)) % 2**31))


def sample_one(logits: Tensor, text: Request, draft: Sequence[int] = ()) -> SampleResult:
    """Sample the tokens of one request from its rows of logits."""
    return Sampler({EOS}).sample(logits, [SamplerInput(text, draft, 0)]).results[text]


def one_by_one(prompt: list[int], count: int, **sampling: object) -> list[int]:
    """Return the text that is sampled without drafts."""
    text = request(prompt, [], **sampling)
    while text.num_output_tokens < count and text.finish_reason is None:
        step = sample_one(logits_of(text.tokens)[None], text)
        text.append_token(step.tokens[0], {EOS})
    return text.tokens[len(prompt) :]


PROMPT = [3, 1, 4, 1, 5]
WAYS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "drawn": {"temperature": 0.9, "top_k": 6, "seed": 5},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.6, "ignore_eos": True},
    "repetition": {"temperature": 0.7, "repetition_penalty": 1.9, "seed": 2, "ignore_eos": True},
    "late end": {"temperature": 1.5, "min_tokens": 9, "seed": 3},
    "wanted end": {"temperature": 0.0, "min_tokens": 4, "logit_bias": ((EOS, 9.0),)},
    "bias": {"temperature": 0.5, "logit_bias": ((2, 3.0), (EOS, -100.0)), "seed": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_a_text_goes_on_as_it_would_have_without_drafts(way: str, wrong: int | None) -> None:
    """All draft tokens are right except the one at `wrong`."""
    sampling, text = WAYS[way], one_by_one(PROMPT, 18, **WAYS[way])
    assert len(text) > 4
    for known in range(1, len(text) - 3):
        draft = text[known : known + 3]
        if wrong is not None:
            draft[wrong] = (draft[wrong] + 1) % 12
        rows = torch.stack([logits_of([*PROMPT, *text[:known], *draft[:i]]) for i in range(len(draft) + 1)])
        asked = request(PROMPT, text[:known], **sampling)
        step = sample_one(rows, asked, draft)
        right = 3 if wrong is None else wrong
        assert step == SampleResult(text[known : known + right + 1])


def test_requests_of_a_step_keep_to_their_own_rows() -> None:
    """One request with a draft, one without, and rows of the logits that belong to no request."""
    logits = torch.full((6, 12), -1.0)
    for row, winner in enumerate([9, 4, 5, 6, 9, 8]):
        logits[row, winner] = 1.0
    first, second = (request(PROMPT, [2], temperature=0.0, logprobs=n) for n in (2, None))
    output = Sampler(()).sample(logits, [SamplerInput(first, [4, 5], 1), SamplerInput(second, [], 5)])
    assert output.results == {first: SampleResult([4, 5, 6]), second: SampleResult([8])}
    told = output.logprobs[first]
    assert output.logprobs[second] is None
    assert told is not None
    assert [(score.token, score.rank, len(score.top_logprobs)) for score in told] == [(4, 1, 2), (5, 1, 2), (6, 1, 2)]


# -------------------------------------------------------------------- distributions
def test_drawn_tokens_are_distributed_as_the_model_says_whatever_the_draft_was() -> None:
    """After an accepted token the next is drawn from its own logits; chi-squared test at 99.9 %."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5, -1.0], [-1.0, 0.0, 0.3, 0.9, -0.2]])
    p, q = logits.double().softmax(-1).tolist()
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    for seed in range(DRAWS):
        asked = request(PROMPT, [2], temperature=1.0, seed=seed)
        step = sample_one(logits, asked, [1])
        first[step.tokens[0]] += 1
        assert (len(step.tokens) == 2) == (step.tokens[0] == 1)
        second.update(step.tokens[1:])
    accepted = second.total()
    assert abs(accepted - DRAWS * p[1]) < 4 * (DRAWS * p[1] * (1 - p[1])) ** 0.5, "accepted as rejection sampling would"
    for counts, shares, total in ((first, p, DRAWS), (second, q, accepted)):
        chi_squared = sum((counts[i] - total * share) ** 2 / (total * share) for i, share in enumerate(shares))
        assert chi_squared < 18.47, "4 degrees of freedom"

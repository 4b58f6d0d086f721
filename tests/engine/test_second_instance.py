"""A second instance's rows in the steps of a request, as its drafts: done by an extension, unknown to the core.

The second instance keeps few tokens, and predicts in one row what may come after each of its guesses (Jacobi decoding,
Santilli et al. 2023, arXiv:2305.10427); the request's own row verifies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from server.engine.extension import StepExtension
from server.engine.instance import Instance
from server.engine.model_runner import StepOutput
from server.engine.scheduling.request import Request
from server.engine.scheduling.scheduler import has_room, limit_row, update_length
from server.engine.scheduling.step import Scheduled
from server.records import Outcome
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.stateful_model import StatefulModel, loaded_with_states
from tests.models.random_models import load_decoder

NUM_GUESSES, COUNT = 4, 24


@dataclass
class Guesses:
    """Implements DraftProposer: the tokens that the second instance has predicted for a text."""

    second: Request
    predicted: Mapping[int, int] = field(default_factory=dict)  # tokens by position
    num_accepted: int = 0

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return the predictions for the positions after the text."""
        guesses: list[int] = []
        while len(guesses) < max_tokens and (token := self.predicted.get(len(text) + len(guesses))) is not None:
            guesses.append(token)
        return guesses

    def update_draft_length(self, accepted: int) -> None:
        self.num_accepted += accepted


class SecondInstance(StepExtension):
    """Opens a sequence of a second instance for each request, and adds a row of it to each step of the request."""

    def __init__(self) -> None:
        self.instance: Instance | None = None
        self.by_request: dict[Request, Guesses] = {}
        self.num_accepted = self.num_computed = 0  # tokens: of the drafts, and of the texts under the second instance

    def queued(self, request: Request) -> None:
        """Let a request get drafts of the second instance."""
        assert self.instance is not None
        salt = request.salt._replace(shadow=True)
        second = Request(request.key, request.tokens, request.sampling, self.instance, "drafts", salt, is_shadow=True)
        request.proposer = self.by_request[request] = Guesses(second)

    def add_rows(self, rows: Sequence[Scheduled]) -> list[Scheduled]:
        """Return a row for each request whose own row reaches the end of its text: what is missing, then guesses."""
        added = []
        for request in [row.request for row in rows if row.samples]:
            second = self.by_request[request].second
            if second.sequence is None:
                second.sequence = second.instance.open(second.tokens, salt=second.salt)
                if second.sequence is None:
                    continue
                second.num_computed_tokens = second.sequence.length
            missing = second.num_remaining_tokens
            guesses = self.by_request[request].propose(request.tokens, NUM_GUESSES)
            guesses = (guesses + [request.tokens[-1]] * NUM_GUESSES)[:NUM_GUESSES]
            with second.instance.guard["schedule"]:
                if not second.has_committed and not update_length(second):
                    continue
                most = limit_row(second.sequence, second.num_computed_tokens, missing + NUM_GUESSES)
                if not has_room(second.sequence, second.num_computed_tokens, most):
                    continue
            draft = guesses[: max(0, most - missing)]
            added.append(Scheduled(second, min(most, missing), draft, num_observed=1 + len(draft)))
        return added

    def committed(self, output: StepOutput) -> StepOutput:
        """Take the predictions of the second instance, and take out its rows."""
        by_second = {guesses.second: guesses for guesses in self.by_request.values()}
        for second, logits in output.observed.items():
            if (guesses := by_second.get(second)) is not None:
                end = second.num_computed_tokens  # with this row's tokens, without its guesses
                guesses.predicted = dict(enumerate(logits.argmax(dim=1).tolist(), end))
        return output.without({row.request for row in output.scheduled if row.request in by_second})

    def ended(self, request: Request, outcome: Outcome) -> Mapping[str, Any]:
        """Close the second sequence of a request."""
        guesses = self.by_request.pop(request)
        self.num_accepted += guesses.num_accepted
        self.num_computed += guesses.second.num_computed_tokens - request.num_prompt_tokens
        if guesses.second.sequence is not None:
            guesses.second.instance.close(guesses.second.sequence)
        return {}

    def __len__(self) -> int:
        return sum(guesses.second.sequence is not None for guesses in self.by_request.values())


SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        paged={"kind": "paged", "block_size": 4},
        window={"kind": "sliding_window", "window": 30, "sinks": 2},
        streaming={"kind": "streaming", "window": 30, "every": 8},
    ),
    "max_seq_len": 96,
    "kv_memory": "16MiB",
}


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("second", ["window", "streaming"])
def test_a_second_instance_drafts_in_the_steps_of_a_request(
    tiny: Path, reference: Reference, second: str, *, has_states: bool
) -> None:
    extension = SecondInstance()
    with loaded_with_states() if has_states else nullcontext():
        driver = Driver(tiny, extensions=[extension], **SETTINGS)
    if has_states:
        reference = Reference(StatefulModel(load_decoder(tiny)))  # type: ignore[arg-type]
    extension.instance = driver.core.instances[second]
    prompts = [random_prompt(n, seed=3) * 2 for n in (9, 12, 14)]
    heard = [driver.submit(str(i), prompt, COUNT, kv_cache="paged") for i, prompt in enumerate(prompts)]
    driver.run()
    for prompt, each in zip(prompts, heard, strict=True):
        assert each.tokens == reference.greedy(prompt, COUNT)
    assert extension.num_computed > COUNT, "the second instance stood still"
    # With the toy's states no token repeats another one, which is what the guesses live on
    assert has_states or extension.num_accepted > 0, "no guess was right"
    driver.assert_nothing_leaked()

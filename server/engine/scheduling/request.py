"""A request in the engine: its tokens, parameters, seat and statistics. Knows neither tensors nor sockets."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from cache_strategies.errors import StrategyError
from server.engine.ipc.messages import Caching, Failed, SamplingParams
from server.records import FoundPrefix

if TYPE_CHECKING:
    from cache_strategies.base import KVSequence
    from cache_strategies.types import Salt
    from server.engine.instance import Instance


log = logging.getLogger(__name__)


class RequestError(Exception):
    """A request that cannot be served; the API worker answers it with an HTTP error of this status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def to_message(self, request_id: str = "") -> Failed:
        """Return the error as a message for the API worker."""
        return Failed(request_id, self.status, self.message, self.code, self.param, self.retry_after)


def make_rejection(request_id: str, error: Exception) -> Failed:
    """Return the message for the client whose request could not be queued because of `error`; log an unexpected one."""
    match error:
        case RequestError():
            return error.to_message(request_id)
        case StrategyError():
            return Failed(request_id, 500, error.message, "strategy_failed")
    log.error("a request could not be queued; other requests go on", exc_info=error)
    name = type(error).__name__
    message = f"queueing this request failed ({name}); the server's log has the cause; other requests go on"
    return Failed(request_id, 500, message, "request_failed")


class DraftProposer(Protocol):
    """Proposes draft tokens for a request's text, for speculative decoding."""

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` draft tokens to follow the text."""

    def update_draft_length(self, accepted: int) -> None:
        """Adapt the length of the next draft to the number of accepted tokens of the last one."""


class OutputGrammar(Protocol):
    """The state of a request's grammar, after its output."""

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow the output."""

    @property
    def fault(self) -> str | None:
        """Why the request cannot go on; None: it can."""

    @property
    def draft_fault(self) -> str | None:
        """Why no token is allowed after some tokens of the last draft, although the grammar allows these; or None."""

    def accept(self, token: int) -> None:
        """Append a token to the output."""

    def record_failure(self) -> None:
        """Count that the grammar ends its request."""

    def cut_draft(self, draft: Sequence[int]) -> list[int]:
        """Return the beginning of a draft that the grammar allows."""

    def compute_masks(self, draft: Sequence[int], end_ids: Collection[int], eos_ids: Collection[int]) -> Sequence[Any]:
        """Return an array of which tokens [V] may come after the output, and after each token of the draft."""


class ReasoningLimit(Protocol):
    """What ends the reasoning of a request's text."""

    def find_forced_tokens(self, output: Sequence[int], first: int, draft: Sequence[int]) -> Sequence[int | None]:
        """Return for the token after the output, and after each token of the draft, which one it has to be, if any."""


class PlannedShadow(NamedTuple):
    """A shadow that is to begin with its served request."""

    instance: Instance | None  # the second one; None: it is in quarantine
    rollout: str | None = None  # the roll-out for which the request is shadowed; None: a rule's, or a client's
    is_reference: bool = False  # whether the client gets the divergence of each token from this instance


@dataclass(slots=True)
class RequestTimes:
    """When a request's events happened, in seconds of the monotonic clock; 0: not yet.

    Only last_token can change, and admitted if the request is moved to a fallback.
    """

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(eq=False, slots=True)
class Request:
    """A request: waiting while it has no seat, running while it has one. Preemption only takes away the seat."""

    key: tuple[int, str]  # the API worker and the id that it gave the request
    tokens: list[int]  # prompt and output
    sampling: SamplingParams
    instance: Instance
    reason: str  # what chose the instance, as in RequestRecord
    salt: Salt  # only sequences with an equal salt share cached tokens with this request
    priority: int = 0
    caching: Caching = field(default_factory=Caching)
    fallback_of: str | None = None  # the instance that was chosen, if a fallback of it serves the request
    reports_progress: bool = False  # whether the client is told how much of the prompt is computed
    explain: bool = False  # whether the client gets this request's RequestRecord when it ends
    rollout: str | None = None  # the roll-out that chose the instance or a shadow; None: none did
    conversation: str | None = None  # as in RequestRecord
    is_shadow: bool = False  # whether it only repeats another request under a candidate (engine/shadow)
    planned_shadow: PlannedShadow | None = None  # the shadow that begins with it; None: it has none
    # All choices (n > 1) of the same prompt, this request included
    siblings: list[Request] = field(default_factory=list)
    proposer: DraftProposer | None = None  # proposes draft tokens; None: the request gets no drafts
    thinking: ReasoningLimit | None = None  # None: the text may reason as long as it likes
    grammar: OutputGrammar | None = None  # what the text has to be; None: any text
    completes_grammar: bool = False  # whether the text has ended because nothing can follow it by the grammar
    due: float = 0.0  # sort key of the queue: when it arrived, by the monotonic clock, shifted by its priority
    arrival_index: int = 0  # number of the request in order of arrival: sorts requests with the same `due`
    sequence: KVSequence | None = None
    num_computed_tokens: int = 0  # of the seat, in the cache; counted by the engine from the first commit on
    has_committed: bool = False  # whether a row of the seat was committed
    found: FoundPrefix = field(default_factory=FoundPrefix)  # what its sequence found in the cache
    # Why the instance has refused a seat or room since the request last had a row, if it has: "nothing" means that the
    # memory had refused nothing
    refusal: Literal["memory", "nothing"] | None = None
    peak_bytes: int = 0  # bytes of KV memory that the request may need at most; set when it is queued
    num_cached_tokens: int | None = None  # number of prompt tokens found in the cache; None until its first row has run
    miss: str | None = None  # why no more prompt tokens were found (`cache_strategies.base.Miss`)
    num_recomputed_tokens: int = 0  # of the prompt, that are cached and were computed again
    forked: bool = False  # whether the request took over the prompt that another choice (n > 1) had computed
    num_preemptions: int = 0
    num_compactions: int = 0
    compaction_seconds: float = 0.0  # of all compactions together
    # Value of Scheduler._room_changes when this request last found no room; -1: it has not been refused
    refused_at: int = -1
    passed_over: int = 0  # number of later requests that were admitted while this request found no room
    num_output_tokens: int = 0
    num_scored_tokens: int = 0  # number of prompt tokens whose log-probabilities have been sent
    num_draft_tokens: int = 0  # number of draft tokens that the model has verified
    num_accepted_tokens: int = 0  # number of draft tokens that became part of the text
    finish_reason: Literal["stop", "length"] | None = None
    num_prompt_tokens: int = field(init=False)
    times: RequestTimes = field(default_factory=lambda: RequestTimes(time.monotonic()))

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def queue_key(self) -> tuple[float, int]:
        """The sort key of the queue: requests with lower keys run first and are preempted last."""
        return self.due, self.arrival_index

    @property
    def kv_bytes(self) -> int:
        """The bytes of KV memory for the text; shared blocks count in full. 0 if the strategy does not say."""
        try:
            return self.instance.bytes_for(len(self.tokens))
        except StrategyError:
            return 0

    @property
    def waits_for_sibling(self) -> bool:
        """Whether the request waits for the first choice (n > 1) of its prompt, which computes the prompt for all."""
        if self.num_output_tokens or not self.instance.forks:
            return False
        return next((sibling for sibling in self.siblings if not sibling.num_output_tokens), self) is not self

    @property
    def num_remaining_tokens(self) -> int:
        """The number of tokens of prompt and output that have not entered the cache yet."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def max_total_tokens(self) -> int:
        """The maximum number of tokens of prompt and output."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def num_bounded_tokens(self) -> int:
        """The number of tokens that max_seq_len bounds: all, or those of the prompt under an unbounded strategy."""
        return self.num_prompt_tokens if self.instance.contract.unbounded else self.max_total_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be sent, for which the prompt has to be computed."""
        return self.sampling.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def max_cached(self) -> int | None:
        """The maximum number of prompt tokens that the request may take from the cache; None: any number."""
        return 0 if self.needs_prompt_logprobs else self.caching.max_cached

    def propose_draft(self, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` draft tokens; an empty list if the request does not decode or has no proposer."""
        if self.proposer is None or not self.num_output_tokens or self.num_remaining_tokens > 1:
            return []
        # The draft leaves room for the token that is sampled after it.
        max_tokens = min(max_tokens, self.sampling.max_tokens - self.num_output_tokens - 1)
        draft = self.proposer.propose(self.tokens, max_tokens) if max_tokens > 0 else []
        return draft if self.grammar is None or not draft else self.grammar.cut_draft(draft)

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count the verified and the accepted tokens of a draft, and adapt the length of the next one."""
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        if self.proposer is not None:
            self.proposer.update_draft_length(accepted)

    def append_token(self, token: int, eos_ids: Collection[int]) -> None:
        """Append a sampled token, and set finish_reason if the text ends with it.

        It is the last token of a text that is complete by its grammar, or a token that ends texts.
        """
        self.tokens.append(token)
        self.num_output_tokens += 1
        now = time.monotonic()
        self.times.first_token = self.times.first_token or now
        self.times.last_token = now
        if token in self.get_end_token_ids(eos_ids):
            self.finish_reason = "stop"
            return
        if self.grammar is not None:
            self.grammar.accept(token)
            self.completes_grammar = self.grammar.is_complete
        if self.completes_grammar:
            self.finish_reason = "stop"
        elif self.num_output_tokens >= self.sampling.max_tokens:
            self.finish_reason = "length"

    def find_grammar_fault(self, *, is_allowed: bool) -> str | None:
        """Return why the grammar ends the request, which the grammar counts; None: the text goes on or is complete.

        `is_allowed` says whether the last step found a token that may follow.
        """
        if self.grammar is None or self.finish_reason is not None or (is_allowed and self.grammar.fault is None):
            return None
        self.grammar.record_failure()
        fault = self.grammar.fault or self.grammar.draft_fault
        return (
            f"the grammar of the text: {fault or 'with the other parameters of the request, it allows no token here'}"
        )

    def check_allowed_tokens(self, eos_ids: Collection[int]) -> None:
        """Raise RequestError if allowed_token_ids has only end tokens while min_tokens forbids these at first."""
        if not (self.sampling.allowed_token_ids and self.sampling.min_tokens):
            return
        if {*array("q", self.sampling.allowed_token_ids)} <= {*self.get_end_token_ids(eos_ids)}:
            message = (
                "allowed_token_ids: all of them end the text, which min_tokens forbids at first: allow other tokens "
                "or remove min_tokens"
            )
            raise RequestError(400, message, param="allowed_token_ids")

    def get_end_token_ids(self, eos_ids: Collection[int]) -> Collection[int]:
        """Return the ids of the tokens that end the text: the request's and, unless ignore_eos is set, the model's."""
        if self.sampling.ignore_eos:
            return self.sampling.stop_token_ids
        return {*eos_ids, *self.sampling.stop_token_ids} if self.sampling.stop_token_ids else eos_ids

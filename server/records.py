"""Records of an engine, its steps and its requests: the engine writes them, metrics, logs and the API read them.

Data only. Engine and metrics do not import each other; both import this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:  # API workers import this file, and must not import strategies
    from cache_strategies.registry import DeclaredInstance
    from cache_strategies.types import BlockEvents, Blocks, CacheUsage

# What a waiting request waits for: a seat (of max_num_seqs), memory, the prompt that another choice (n > 1) computes,
# or its turn in the queue
WaitReason = Literal["seats", "memory", "sibling", "turn"]
Outcome = Literal["stop", "length", "cancelled", "error"]  # how a request ended
Phase = Literal["prefill", "decode", "mixed"]  # the kind of a step's rows; mixed: both kinds
Role = Literal["engine", "api", "supervisor"]  # kind of process
# What constrains a text: JSON (a schema, or any object), a regular expression, texts of which it is one, a grammar, or
# tools that a grammar holds calls to
ConstraintName = Literal["json", "regex", "choice", "grammar", "tools"]
# Why a constraint ends its request: it is wrong or not supported, too large, its check took too much time or memory or
# crashed, it could not be checked at the moment, or it failed in the engine
ConstraintRefusal = Literal["invalid", "too_large", "timeout", "memory", "crash", "unavailable", "failed"]


class WeightUsage(NamedTuple):
    """The weights that a model has in one format."""

    parameters: int
    nbytes: int  # with scales


@dataclass(frozen=True)
class StepPart:
    """The numbers of rows and tokens that a step computes for one strategy instance."""

    decode_rows: int = 0
    prefill_rows: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Admission:
    """A request whose first row has run. Recorded once per request, even if it is preempted and admitted again."""

    instance: str
    prompt_tokens: int
    cached_tokens: int  # number of prompt tokens that were found in the cache
    miss: str | None  # see RequestRecord
    forked: bool  # see RequestRecord
    recomputed_tokens: int = 0  # see RequestRecord


class FoundPrefix(NamedTuple):
    """How much of a prompt its sequence found in the cache."""

    tokens: int = 0
    miss: str | None = None  # why not more; see RequestRecord
    recomputed: int = 0  # tokens after these that are cached, too, and computed again: from a checkpoint of states on


class DraftRecord(NamedTuple):
    """A draft of a request's next tokens that was verified in a step."""

    num_tokens: int
    num_accepted: int  # the number of leading draft tokens that were accepted


class Compaction(NamedTuple):
    """A compaction of a sequence: the strategy dropped some of its keys after a step."""

    seconds: float  # of KVCache.compact, on the host
    dropped_tokens: int


class GrammarEvents(NamedTuple):
    """What happened to the grammars of requests between two reports of steps."""

    step_seconds: float  # CPU time of masks, of accepting tokens and of cutting drafts; 0: no text was constrained
    compile_seconds: Sequence[float]  # of each grammar that was compiled
    lookups: int  # number of requests that got a compiled grammar
    hits: int  # number of these whose grammar had been compiled for another request
    failures: int  # number of requests that their grammars ended


@dataclass
class StepReport:
    """The metrics of one step of the engine. Mappings are keyed by instance, unless noted.

    The last four are set by extensions of the engine.
    """

    seconds: float
    parts: Mapping[str, StepPart]
    preemptions: Mapping[str, int]  # number of preempted requests
    failures: Mapping[str, int]  # number of faults of the strategy: exceptions, wrong results, things left undone
    generated_tokens: Mapping[str, int]  # number of sampled tokens
    drafts: Mapping[str, Sequence[DraftRecord]]
    forks: Mapping[str, int]  # number of requests that took over the prompt of another choice (n > 1)
    admissions: Sequence[Admission]
    evicted_bytes: Mapping[str, int]  # bytes of idle memory that were evicted since the last step
    compactions: Mapping[str, Sequence[Compaction]]
    # Seconds between each sampled token and the token before it in its text
    inter_token_seconds: Mapping[str, Sequence[float]]
    block_events: Mapping[str, BlockEvents]
    # Seconds of the step by operation; None: operations were not timed in this step
    op_seconds: Mapping[str, float] | None
    shadows: Sequence[RequestFidelity] = ()  # comparisons with candidate instances that ended
    shadow_tokens: Mapping[str, int] = field(default_factory=dict)  # number of tokens computed for shadows
    rollbacks: Sequence[str] = ()  # names of the roll-outs that a guard rolled back since the last report
    grammars: GrammarEvents | None = None  # None: nothing happened to grammars

    @property
    def rows(self) -> int:
        return sum(part.decode_rows + part.prefill_rows for part in self.parts.values())

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())

    @property
    def phase(self) -> Phase:
        """The kind of rows in the step, which must have at least one row."""
        if not any(part.prefill_rows for part in self.parts.values()):
            return "decode"
        return "mixed" if any(part.decode_rows for part in self.parts.values()) else "prefill"


class KVTokens(NamedTuple):
    """The committed tokens of open sequences, of which shared ones count in each: whose keys are kept, and the rest."""

    kept: int
    dropped: int  # KVCache.count_dropped_tokens


class Routing(msgspec.Struct, frozen=True):
    """Why a router has sent a request to a replica, of several that serve the model (server/cluster)."""

    replica: str
    reason: str  # one of `server.cluster.router.Reason`
    expected_cached_tokens: int  # that the router expected the replica to find


class RequestRecord(msgspec.Struct, frozen=True):
    """A request that has ended. Times are in seconds, and None if the request ended before that phase did."""

    instance: str
    # What chose the instance: "request", "header", "model", "rule <i>", "default", "fallback of <instance>" or
    # "rollout <name>: canary" (or complete)
    reason: str
    outcome: Outcome
    prompt_tokens: int
    cached_tokens: int | None  # number of prompt tokens found in the cache; None: the request was never admitted
    # Why no more prompt tokens were found (`cache_strategies.base.Miss`); None: all were found, or not looked up
    miss: str | None
    forked: bool  # whether it took over the prompt of another choice (n > 1) instead of looking it up in the cache
    generated_tokens: int
    drafted_tokens: int  # number of draft tokens that were verified
    accepted_tokens: int  # number of draft tokens that were accepted
    preemptions: int
    kv_bytes: int  # peak bytes of KV memory for its text; shared blocks count in full
    kept_tokens: int  # number of its tokens in the cache at its end, as in KVTokens; 0 after an error, without a seat
    dropped_tokens: int  # likewise: number of tokens whose keys its strategy had dropped
    budget_tokens: int | None  # KVCache.token_budget of its tokens in the cache at its end; None after an error, too
    compactions: int
    compaction_seconds: float  # all compactions together
    queue_seconds: float | None  # from the request's arrival to its first admission
    prefill_seconds: float | None  # from the request's first admission to its first token
    decode_seconds: float | None  # from the request's first token to its last
    first_token_seconds: float | None  # from the request's arrival to its first token
    total_seconds: float  # from the request's arrival to its end
    # Prompt tokens that are cached and were computed again, from the last checkpoint of the model's states on
    recomputed_tokens: int = 0
    rollout: str | None = None  # the roll-out that chose its instance or its shadow; None: none did
    shadow: str | None = None  # the candidate instance under which it also ran; None: under none
    fidelity_tokens: int = 0  # number of its tokens that were compared with the candidate's when it ended
    fidelity_kl: float | None = None  # mean KL divergence of these tokens, nats; None: none was compared
    fidelity_top1: float | None = None  # share of these tokens for which both have the same likeliest token
    fallback_of: str | None = None  # the instance that was chosen, if `instance` served the request in its place
    # Equal for requests of a conversation, and for choices of a prompt; None: it counts in no arm of a roll-out
    conversation: str | None = None
    routing: Routing | None = None  # None: there is one replica, or it is not known yet; the API's process adds it


REPORT_CONFIDENCE = 0.95  # of the intervals that users see


class RequestFidelity(msgspec.Struct, frozen=True):
    """How far a candidate instance was from the served one, over the output tokens of a request that ran under both.

    The candidate was fed the tokens that the served instance generated. The lists have an item for each compared token.
    """

    served: str  # the instance that answered the request
    candidate: str  # the instance under which it also ran, as a shadow
    rollout: str | None  # the roll-out for which it did; None: a rule's
    kl: list[float]  # KL divergence KL(served || candidate), nats
    agreed: list[bool]  # whether both have the same likeliest token
    rank: list[int]  # rank of the served token under the candidate; 1: the likeliest
    served_bytes: int  # bytes of KV memory for the text, as in RequestRecord.kv_bytes
    candidate_bytes: int
    # Why the comparison ended before the text: "room" (its memory or seat was needed), "failed" (the candidate raised,
    # or its logits were not finite); None: all output tokens were compared
    ended_early: Literal["room", "failed"] | None = None


class DeviceMemory(NamedTuple):
    """How much memory of a device is used and free, in bytes; for a CPU that of the machine, or of the container."""

    used: int
    free: int


@dataclass(frozen=True)
class EngineInfo:
    """The properties of an engine that do not change while it runs."""

    instances: Sequence[DeclaredInstance]
    backends: Mapping[str, str]  # the name of the backend that computes each operation
    fallback_ops: Sequence[str]  # operations whose kernels failed their check; plain torch computes them
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    restarts: int  # number of engines that this server ran before this one
    disabled: Collection[str]  # names of further instances, which have no cache: a call of theirs did not return


@dataclass(frozen=True)
class EngineState:
    """Gauges of an engine: bytes and counts, keyed by instance unless noted."""

    running: Mapping[str, int]  # number of running requests
    waiting: Mapping[tuple[str, WaitReason], int]  # number of waiting requests by instance and by what they wait for
    usage: Mapping[str, CacheUsage]
    tokens: Mapping[str, KVTokens]
    budget_tokens: Mapping[str, int]  # KVCache.token_budget of the longest text; without a budget, all of its tokens
    blocks: Mapping[str, Blocks]
    checkpoint_bytes: Mapping[str, int]  # of recurrent states, which are among the used or the idle bytes
    floor_bytes: Mapping[str, int]
    quarantined: Collection[str]  # instances that get no requests after repeated faults
    pool_held: int  # bytes of KV memory that strategies hold
    pool_warm: int  # bytes of KV memory that no strategy holds, and that the system has provided
    pool_cold: int  # bytes of KV memory that no strategy holds, and that the system does not provide now
    device_memory: DeviceMemory
    process_memory: Mapping[Role, int]  # resident bytes by role of the process
    # By name of the roll-out: its state, such as "canary", and the share of requests that its candidate serves, 0 to 1
    rollouts: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    # Pairs (served, candidate) of instances that shadows compare, so that their metrics begin at zero
    shadow_pairs: Collection[tuple[str, str]] = ()

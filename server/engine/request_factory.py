"""Makes the request of a message: has its strategy instance chosen, sets up its shadow, drafts and grammar.

Knows the state of instances; neither the queue nor what becomes of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cache_strategies.errors import StrategyError
from cache_strategies.memory import Memory
from cache_strategies.types import Salt
from server.engine.grammar.compiler import CompilationFailed, GrammarCompiler
from server.engine.grammar.state import GrammarState
from server.engine.instance import Instance
from server.engine.ipc.messages import Submit
from server.engine.isolation.fallbacks import Fallbacks
from server.engine.isolation.isolation import Isolation
from server.engine.sampling.ngram_proposer import NgramProposer
from server.engine.sampling.thinking import ThinkingLimiter
from server.engine.scheduling.request import PlannedShadow, Request, RequestError
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.selection import Selector, find_conversation
from server.text.errors import GrammarError

# The requests of an engine that have not ended, by API worker and the id that it gave the request
RequestTable = Mapping[tuple[int, str], Request]


class RequestFactory:
    """Makes an engine's requests."""

    def __init__(
        self,
        selector: Selector,
        isolation: Isolation,
        fallbacks: Fallbacks,
        memory: Memory,
        scheduler: Scheduler,
        eos_ids: Collection[int],
        grammars: GrammarCompiler,
    ) -> None:
        """Make requests for `scheduler`, whose limits apply; `eos_ids`: the tokens that end the model's texts."""
        self._selector = selector
        self._isolation = isolation
        self._fallbacks = fallbacks
        self._memory = memory
        self._scheduler = scheduler
        self._eos_ids = eos_ids
        self._grammars = grammars

    def make(self, worker: int, message: Submit, requests: RequestTable) -> Request:
        """Make the request of a message from API worker `worker`. Raises RequestError if it is invalid.

        Its grammar, if it has one, is compiled.
        `requests` are those that have not ended, among which are the other choices (n > 1) of its prompt.
        """
        choice = self._selector.choose(message, self._memory.usage, self._fallbacks)
        instance = self._isolation.instances[choice.instance]
        speculation = self._scheduler.limits.resolve_speculation(message.speculation)
        request = Request(
            (worker, message.request_id),
            list(message.prompt),
            message.sampling,
            instance,
            choice.reason,
            Salt(message.caching.tenant, message.caching.cache_salt),
            priority=message.priority,
            caching=message.caching,
            explain=message.explain,
            reports_progress=message.reports_progress,
            rollout=choice.rollout,
            conversation=find_conversation(message) if choice.is_counted else None,
            siblings=_find_siblings(worker, message, instance, requests),
            fallback_of=choice.fallback_of,
        )
        request.check_allowed_tokens(self._eos_ids)
        if message.sampling.thinking is not None:
            request.thinking = ThinkingLimiter(message.sampling.thinking)
        if message.grammar is not None:
            request.grammar = self._make_grammar_state(message.grammar)
        # No drafts for a strategy whose state depends on how tokens are split into rows: they would change the text.
        if speculation.num_speculative_tokens and instance.contract.chunk_invariant:
            longest = min(request.max_total_tokens, self._scheduler.limits.max_seq_len)
            request.proposer = NgramProposer(speculation, longest)
        if message.reference is not None:
            reference = self._selector.check_name(message.reference, "kv_cache_reference", "kv_cache_reference")
            request.planned_shadow = PlannedShadow(self._find_shadow(reference), is_reference=True)
        elif choice.shadow is not None:
            request.planned_shadow = PlannedShadow(self._find_shadow(choice.shadow), choice.rollout)
        return request

    def _make_grammar_state(self, grammar: str) -> GrammarState:
        """Return the state at the start of a compiled grammar. Raises RequestError if it could not be compiled."""
        try:
            return self._grammars.make_state(grammar)
        except GrammarError as error:
            raise RequestError(400, f"the grammar of the text: {error}", code="invalid_grammar") from None
        except CompilationFailed as error:
            raise RequestError(500, f"the grammar of the text: {error}", code="request_failed") from None

    def _find_shadow(self, name: str) -> Instance | None:
        """Return a second instance; None if it is disabled or in quarantine. After a quarantine it is built anew."""
        instance = self._isolation.instances.get(name)
        if instance is not None and name in self._isolation.quarantined:
            if instance.num_open:
                return None  # one request is trying it
            try:
                self._isolation.end_quarantine(name)
            except StrategyError:
                return None
        return instance


def _find_siblings(worker: int, message: Submit, instance: Instance, requests: RequestTable) -> list[Request]:
    """Return the list of requests that all choices (n > 1) of one prompt share; a new one for the first choice."""
    sibling = requests.get((worker, message.sibling_of)) if message.sibling_of is not None else None
    if sibling is None or sibling.instance is not instance or sibling.caching != message.caching:
        return []
    return sibling.siblings if sibling.tokens[: sibling.num_prompt_tokens] == message.prompt else []

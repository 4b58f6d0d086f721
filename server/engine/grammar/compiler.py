"""Compiles the grammars of requests in a thread beside the engine's steps, and keeps the latest ones.

A request with a grammar waits here until that is compiled; only then the engine takes it. The grammars were checked
before (`server/text/processes`), so that each takes little time and memory. llguidance releases Python's lock while it
compiles. Knows no request: what waits for a grammar is the caller's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue

from llguidance import LLMatcher, LLTokenizer

from server.engine.grammar.meter import GrammarMeter
from server.engine.grammar.state import GrammarState
from server.grammar.matcher import TokenTable, compile_grammar
from server.text.errors import GrammarError
from server.text.processes.messages import VocabularyData
from server.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

MAX_KEPT = 64  # most compiled grammars that are kept, beside those in use
STACK_BYTES = 2**26  # of the thread: many times the stack of the process that has checked the grammars
_STACK_LOCK = threading.Lock()  # held while the size of new threads' stacks, which is the process's, is changed


class GrammarCompiler:
    """Compiles grammars for one model. Its methods are called by one thread, the engine's."""

    def __init__(self, load_vocabulary: Callable[[], VocabularyData], vocab_size: int) -> None:
        """Compile for a model with `vocab_size` logits.

        `load_vocabulary` is called in the thread when the first grammar comes; until then nothing is loaded.
        """
        self.meter = GrammarMeter()
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._thread: threading.Thread | None = None
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._done: SimpleQueue[tuple[str, LLMatcher | GrammarError, float]] = SimpleQueue()
        self._pending: set[str] = set()
        self._kept: OrderedDict[str, LLMatcher | GrammarError] = OrderedDict()  # the latest at the end
        self._unused: set[str] = set()  # those of the kept ones that no request has used yet
        self._table: TokenTable | None = None  # set by the thread before it returns a compiled grammar
        self._tokenizer: LLTokenizer | None = None  # of the thread

    def prepare(self, grammar: str) -> bool:
        """Return whether a grammar, in Lark, is compiled or has failed; if it is not, start to compile it."""
        self._collect()
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return True
        if grammar not in self._pending:
            self._pending.add(grammar)
            self._start_thread()
            self._orders.put(grammar)
        return False

    def make_state(self, grammar: str) -> GrammarState:
        """Return a state at the start of a grammar for which `prepare` has returned True. Raises GrammarError."""
        compiled = self._kept[grammar]
        if isinstance(compiled, GrammarError):
            self.meter.failures += 1
            raise compiled
        self.meter.lookups += 1
        self.meter.hits += grammar not in self._unused
        self._unused.discard(grammar)
        assert self._table is not None
        return GrammarState(compiled, self._vocab_size, self._table.end_id, self.meter)

    def _collect(self) -> None:
        """Take what the thread has compiled."""
        while not self._done.empty():
            grammar, compiled, seconds = self._done.get()
            self._pending.discard(grammar)
            self._kept[grammar] = compiled
            self._unused.add(grammar)
            self.meter.compile_seconds.append(seconds)
        while len(self._kept) > MAX_KEPT:
            forgotten, _ = self._kept.popitem(last=False)
            self._unused.discard(forgotten)

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        with _STACK_LOCK:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
            finally:
                threading.stack_size(before)

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        while True:
            grammar = self._orders.get()
            began = time.monotonic()
            compiled = self._compile(grammar)
            self._done.put((grammar, compiled, time.monotonic() - began))

    def _compile(self, grammar: str) -> LLMatcher | GrammarError:
        try:
            if self._tokenizer is None:
                self._table = TokenTable(Vocabulary(self._load_vocabulary()))
                self._tokenizer = self._table.make_tokenizer()
            return compile_grammar(self._tokenizer, grammar)
        except GrammarError as error:
            return error
        except Exception as error:  # of a process that does not start, or the model's tokenizer
            log.exception("a grammar could not be compiled; its requests end")
            return GrammarError(f"the server failed to compile it ({type(error).__name__}); its log has the cause")

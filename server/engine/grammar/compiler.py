"""Compiles the grammars of requests in a thread beside the engine's steps, and caches the latest ones.

A request with a grammar waits until that is compiled; only then the engine takes it. The grammars were checked before
(`server/text/processes`), so that each takes little time and memory. llguidance releases Python's lock while it
compiles. Does not know the requests that wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from llguidance import LLMatcher, LLTokenizer

from server.engine.grammar.compiled import CompiledGrammar
from server.engine.grammar.meter import GrammarMeter
from server.engine.grammar.state import GrammarState
from server.grammar.matcher import TokenTable, compile_grammar, make_limits
from server.processes.linux import return_freed_memory
from server.text.errors import GrammarError
from server.text.processes.messages import VocabularyData
from server.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

Failure: TypeAlias = "GrammarError | CompilationFailed"

MAX_CACHED = 64  # most compiled grammars in the cache; those in use may be more
QUICK_SECONDS = 0.005  # within which a grammar is compiled in the engine's thread if its lexer has to be renewed
STACK_BYTES = 2**26  # of the thread: many times the stack of the process that has checked the grammars
_STACK_LOCK = threading.Lock()  # held while the size of new threads' stacks, which is the process's, is changed


class CompilationFailed(Exception):
    """A grammar was not compiled because of the server, not because of itself; another attempt may succeed."""


class CompileTask(NamedTuple):
    """A grammar that the thread compiles."""

    grammar: str
    spare_for: CompiledGrammar | None = None  # the compiled grammar that needs another matcher; None: it is not cached


class CompileResult(NamedTuple):
    """The result of a task."""

    task: CompileTask
    compiled: LLMatcher | Failure
    seconds: float = 0.0  # of the thread's CPU time


class GrammarCompiler:
    """Compiles grammars for one model. Its methods are called by one thread, the engine's."""

    def __init__(self, load_vocabulary: Callable[[], VocabularyData], vocab_size: int) -> None:
        """Compile for a model with `vocab_size` logits.

        `load_vocabulary` is called in the thread, when the first grammar comes.
        """
        self.meter = GrammarMeter()
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._thread: threading.Thread | None = None
        self._tasks: SimpleQueue[CompileTask] = SimpleQueue()
        self._results: SimpleQueue[CompileResult] = SimpleQueue()
        self._pending: set[str] = set()  # grammars that will be cached when they are compiled
        self._cache: OrderedDict[str, CompiledGrammar | Failure] = OrderedDict()  # the latest at the end
        self._unused: set[str] = set()  # those of the cached ones that no request has used yet
        # Set by the thread when it has loaded the tokens
        self._table: TokenTable | None = None
        self._tokenizer: LLTokenizer | None = None

    def prepare(self, grammar: str) -> bool:
        """Return whether a grammar, in Lark, is compiled or has failed; if it is not, start to compile it."""
        self.collect()
        if grammar in self._cache:
            self._cache.move_to_end(grammar)
            return True
        if grammar not in self._pending:
            self._pending.add(grammar)
            self._start_thread()
            self._tasks.put(CompileTask(grammar))
        return False

    def make_state(self, grammar: str) -> GrammarState:
        """Return a state at the start of a grammar for which `prepare` has returned True.

        Raises GrammarError, and CompilationFailed, after which the grammar is compiled anew for the next request.
        """
        compiled = self._cache[grammar]
        if isinstance(compiled, CompilationFailed):
            del self._cache[grammar]
        if not isinstance(compiled, CompiledGrammar):
            self.meter.failures += 1
            raise compiled
        self.meter.lookups += 1
        self.meter.hits += grammar not in self._unused
        self._unused.discard(grammar)
        compiled.prepare_spare()
        return GrammarState(compiled, self._vocab_size, self.meter)

    def collect(self) -> None:
        """Move what the thread has compiled into the cache, or to the grammar that needs it as a spare."""
        while not self._results.empty():
            result = self._results.get()
            if (spare_for := result.task.spare_for) is not None:
                spare_for.add_spare(result.compiled if isinstance(result.compiled, LLMatcher) else None)
            else:
                self._add_to_cache(result)
        while len(self._cache) > MAX_CACHED:
            evicted, _ = self._cache.popitem(last=False)
            self._unused.discard(evicted)

    def _add_to_cache(self, result: CompileResult) -> None:
        grammar = result.task.grammar
        self._pending.discard(grammar)
        self._unused.add(grammar)
        if isinstance(result.compiled, LLMatcher):
            self.meter.compile_seconds.append(result.seconds)
            self._cache[grammar] = self._make_renewable(grammar, result.compiled, result.seconds)
        else:
            self._cache[grammar] = result.compiled

    def _make_renewable(self, grammar: str, start: LLMatcher, seconds: float) -> CompiledGrammar:
        """Return a compiled grammar that can renew its lexer, in a way that fits the seconds of compiling it."""
        assert self._table is not None
        assert self._tokenizer is not None
        if seconds <= QUICK_SECONDS:
            compile_now = partial(LLMatcher, self._tokenizer, grammar, log_level=0, limits=make_limits())
            return CompiledGrammar(start, self._table.end_id, compile_now=compile_now)
        return CompiledGrammar(start, self._table.end_id, order_spare=partial(self._order_spare, grammar))

    def _order_spare(self, grammar: str, spare_for: CompiledGrammar) -> None:
        self._tasks.put(CompileTask(grammar, spare_for))

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
            self._results.put(self._compile(self._tasks.get()))

    def _get_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._table = TokenTable(Vocabulary(self._load_vocabulary()))
            self._tokenizer = self._table.make_tokenizer()
            return_freed_memory()
        return self._tokenizer

    def _compile(self, task: CompileTask) -> CompileResult:
        try:
            tokenizer = self._get_tokenizer()
            began = time.thread_time()
            compiled = compile_grammar(tokenizer, task.grammar)
            return CompileResult(task, compiled, time.thread_time() - began)
        except GrammarError as error:
            return CompileResult(task, error)
        except Exception as error:  # of a process that does not start, or the model's tokenizer
            log.exception("a grammar could not be compiled; its requests end")
            message = f"the server failed to compile it ({type(error).__name__}); its log has the cause"
            return CompileResult(task, CompilationFailed(message))

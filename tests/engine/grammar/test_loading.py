"""The compiler loads the model's tokens when the first grammar comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from config.errors import SettingsError
from server.engine.grammar.compiler import CompilationFailed, GrammarCompiler
from server.grammar.lark import write_lark
from server.text.encoder import Encoder
from server.text.processes.messages import VocabularyData

GRAMMAR = write_lark("regex", "a+")


class CountedLoads:
    """Loads a vocabulary, except the first few times."""

    def __init__(self, data: VocabularyData, failures: int) -> None:
        self._data, self._failures, self.count = data, failures, 0

    def __call__(self) -> VocabularyData:
        self.count += 1
        if self.count <= self._failures:
            raise SettingsError("the process does not start")
        return self._data


@pytest.fixture(scope="module")
def data(model: Path) -> VocabularyData:
    return Encoder.from_directory(model).vocabulary_data


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_tokens_are_loaded_once(data: VocabularyData) -> None:
    loads = CountedLoads(data, failures=0)
    compiler = GrammarCompiler(loads, len(data.tokens))
    wait_until(lambda: compiler.prepare(GRAMMAR))
    wait_until(lambda: compiler.prepare(write_lark("regex", "b+")))
    assert compiler.make_state(GRAMMAR)
    assert loads.count == 1


def test_a_grammar_tries_again_if_loading_failed(data: VocabularyData, caplog: pytest.LogCaptureFixture) -> None:
    loads = CountedLoads(data, failures=1)
    compiler = GrammarCompiler(loads, len(data.tokens))
    wait_until(lambda: compiler.prepare(GRAMMAR))
    assert "could not be compiled" in caplog.text
    with pytest.raises(CompilationFailed):
        compiler.make_state(GRAMMAR)
    wait_until(lambda: compiler.prepare(GRAMMAR))
    assert compiler.make_state(GRAMMAR)
    assert loads.count == 2

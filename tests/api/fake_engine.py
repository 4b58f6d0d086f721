"""An engine without a model, on a real socket with the real protocol: it sends what a test's script returns."""

from __future__ import annotations

import gzip
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from server.engine.ipc.messages import (
    Admitted,
    Answer,
    Cancel,
    Failed,
    FromEngine,
    Hello,
    Observed,
    Profile,
    PromptScores,
    Query,
    Strategy,
    Submit,
    ToEngine,
    TokenLogprob,
    Tokens,
)
from server.engine.ipc.observations import ObservedCounts
from server.engine.ipc.server import EngineServer, WorkerDisconnected
from server.metrics.exposition import FamilyShape, Series, Snapshot
from server.records import WeightUsage
from tests.patience import PATIENCE

T = TypeVar("T", bound="ToEngine | WorkerDisconnected")
Script = Callable[[Submit], list[list[FromEngine]]]  # what to send for a request, frame by frame

HELLO = Hello(
    "tiny",
    aliases=[],
    max_seq_len=256,
    vocab_size=320,
    strategies=[Strategy("paged", "paged"), Strategy("short", "ring")],
    system_fingerprint="fp_of_the_fake",
    weight_formats={"Q4_K": WeightUsage(800, 450), "Q6_K": WeightUsage(200, 165)},
)


def snapshot_of(value: float) -> bytes:
    """Return the metrics of an engine that has nothing but `kvmux_things`."""
    families = [FamilyShape("gauge", "kvmux_things", "Things.", (), (), (Series(()),))]
    return msgspec.msgpack.encode(
        Snapshot(msgspec.Raw(msgspec.msgpack.encode(families)), array("d", [value]).tobytes())
    )


def live_state_of(state: int, num_cells: int = 200) -> bytes:
    """Return the live state of an engine in which all blocks of a region are in one state."""
    region = {"instance": "paged", "held_blocks": num_cells, "blocks_per_cell": 1, "states": bytes([state] * num_cells)}
    requests = {f"0/{state}": {"id": str(state)}}
    return msgspec.json.encode({"object": "live", "regions": {"paged/0": region}, "requests": requests})


class FakeEngine:
    """Serves `path` while used as a context manager. Keeps the messages that it received."""

    def __init__(self, path: Path, script: Script, hello: Hello = HELLO) -> None:
        self._answering = threading.Lock()
        self.begin_again(script)
        self._gateway = EngineServer(path, hello)
        self._thread = threading.Thread(target=self._run, name="fake-engine")
        self._stopping = False

    def begin_again(self, script: Script) -> None:
        """Forget everything, so that the next test finds it as new."""
        with self._answering:  # it may have answered a request, but not noted it yet
            self._forget(script)

    def _forget(self, script: Script) -> None:
        self.script = script
        self.answers = {
            "kv_cache": b'{"instances": {}}',
            "settings": b'{"device": "cpu"}',
            "metrics": snapshot_of(1.0),
            "rollouts": b'{"object": "list", "data": [{"name": "int8", "state": "canary"}]}',
            "fidelity": b'{"object": "list", "data": []}',
            "live": live_state_of(1),
            "prefixes": b'{"object": "prefixes", "instances": {"paged": {"prefixes": [], "omitted": 0}}}',
        }
        self.dated = False  # whether answers have the time they were made at; others are queried again each time
        self.refusal: Failed | None = None  # of commands
        self.refused_questions: Failed | None = None
        self.received: list[ToEngine | WorkerDisconnected] = []  # but for what was observed
        self.counts = ObservedCounts()
        self._workers: dict[str, int] = {}

    def __enter__(self) -> FakeEngine:
        self._gateway.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        self._gateway.close()

    def send(self, *events: Admitted | Tokens | Failed) -> None:
        """Send one frame to the worker of the first event's request."""
        self._gateway.send(self._workers[events[0].request_id], list(events))

    def all(self, kind: type[T]) -> list[T]:
        with self._answering:  # what was answered is noted
            return [message for message in self.received if isinstance(message, kind)]

    def wait_for(self, kind: type[T], count: int = 1) -> list[T]:
        """Return the messages of a kind, as soon as there are `count`."""
        deadline = time.monotonic() + PATIENCE
        while len(found := self.all(kind)) < count:
            assert time.monotonic() < deadline, f"{count} {kind.__name__} expected, received {self.received}"
            time.sleep(0.002)
        return found

    def _run(self) -> None:
        while not self._stopping:
            try:
                worker_id, message = self._gateway.inbox.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(message, Observed):
                self.counts.add(message)
                continue
            if isinstance(message, Cancel) and message.request_id not in self._workers:
                continue  # of an earlier test
            with self._answering:
                for events in self._replies(worker_id, message):
                    self._gateway.send(worker_id, events)
                self.received.append(message)  # last: a test that has seen it finds the replies on their way

    def _replies(self, worker_id: int, message: ToEngine | WorkerDisconnected) -> Iterator[list[FromEngine]]:
        match message:
            case Query(query_id, str(what)) if what in self.answers:
                yield [
                    Answer(
                        query_id,
                        self.answers[what],
                        self.refused_questions,
                        created_at=time.monotonic() if self.dated else 0.0,
                    )
                ]
            case Query(query_id, str()):
                return
            case Query(query_id, Profile()) if self.refusal is None:
                yield [Answer(query_id, gzip.compress(b'{"traceEvents": []}'))]
            case Query(query_id):
                yield [Answer(query_id, b'{"obeyed": true}', self.refusal)]
            case Submit(request_id):
                self._workers[request_id] = worker_id
                yield from self.script(message)
            case _:
                return


# ---------------------------------------------------------------- scripts
def admitted(submit: Submit, cached_tokens: int = 0) -> Admitted:
    return Admitted(submit.request_id, submit.kv_cache or "paged", "default", cached_tokens)


def generates(tokens: list[int], finish_reason: str | None = "length", *, cached_tokens: int = 0) -> Script:
    """Return a script that sends every request these tokens, one a frame. Without a finish_reason it never ends."""

    def script(submit: Submit) -> list[list[FromEngine]]:
        frames: list[list[FromEngine]] = [[admitted(submit, cached_tokens)]]
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            frames.append([Tokens(submit.request_id, [token], finish_reason if last else None)])
        return frames

    return script


def score(token: int, *others: tuple[int, float], logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(token, logprob, 1, [(token, logprob), *others])


def scores(tokens: list[int], finish_reason: str = "length") -> Script:
    """Return a script that scores the prompt in two parts, if the request wants it, and then sends these tokens."""

    def script(submit: Submit) -> list[list[FromEngine]]:
        name, wanted = submit.request_id, submit.sampling
        frames: list[list[FromEngine]] = [[admitted(submit)]]
        if wanted.prompt_logprobs is not None:
            result = [score(token, logprob=-float(i)) for i, token in enumerate(submit.prompt)][1:]
            frames += [[PromptScores(name, result[:1])], [PromptScores(name, result[1:])]]
        for i, token in enumerate(tokens):
            last = finish_reason if i == len(tokens) - 1 else None
            result = [score(token, (0, -3.0))] if wanted.logprobs is not None else None
            frames.append([Tokens(name, [token], last, result)])
        return frames

    return script


def fails(status: int, message: str = "no", code: str | None = None, param: str | None = None) -> Script:
    return lambda submit: [[Failed(submit.request_id, status, message, code, param)]]


def silent(_: Submit) -> list[list[FromEngine]]:
    return []

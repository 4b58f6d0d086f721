"""Strategies of a plug-in with faults in every method, in a server under a load of exact requests.

Every exact request is answered as before. The requests of the strategy at fault end, and the errors, the log and the
metrics name it. The engine goes on, unless a call never returns: then it is started again without that strategy.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.exact_load import Answer, CompletionClient, ExactLoad, make_prompts
from tests.end_to_end.server_process import ANSWER_TTL, PATIENCE, Server, eventually, metric, serving
from tests.engine.isolation.faulty_strategies import faulty
from tests.engine.isolation.planted_faults import FAULTS, select

AT_ONCE = 4  # faults
# Methods that are called without requests of the instance, so that it may be in quarantine before the first one
CALLED_FOR_OTHERS = {"poll", "collect_block_events", "usage", "blocks", "idle_bytes"}
CALLED_AFTER_A_STEP = frozenset[str]()  # so that faults do not follow each other at once, as a quarantine requires
MAX_TOKENS = 12
PROMPT = [5, 6, 7, 8] * 8
CONFIG = """
dtype = "float32"
threads = 1
max_seq_len = 192
max_num_seqs = 16
strategy_timeout = 2.0
"""
LACKING_MEMORY = {name: fault for name, fault in FAULTS.items() if fault.method == "evict"}
RETURNING = {
    name: fault
    for name, fault in select("ends", "stalls", "quiet", "leaks", "nan", "none").items()
    if name not in LACKING_MEMORY
}
HANGING = select("hangs")
FALLING_BACK = ["commit raises", "attend writes NaN"]


def get_instance(what: str) -> str:
    """Return the name of the instance that has a fault."""
    return re.sub(r"\W+", "_", what.replace("-", "minus "))


@contextmanager
def serving_faults(
    folder: Path, faults: Iterable[str], kv_memory: str, fallback: str | None = None
) -> Iterator[Server]:
    """Run a server with an instance for each fault."""
    tables = (
        f'[strategies.{get_instance(name)}]\nkind = "{faulty(name)["kind"]}"\n'
        f'fault = "{name}"\n' + (f'fallback = "{fallback}"\n' if fallback else "")
        for name in faults
    )
    config = folder / "kvmux.toml"
    config.write_text(f'{CONFIG}kv_memory = "{kv_memory}"\n{"".join(tables)}')
    with serving("--config", str(config)) as server:
        yield server


@contextmanager
def under_load(client: CompletionClient) -> Iterator[ExactLoad]:
    load = ExactLoad(client, make_prompts(12, 100), MAX_TOKENS)
    with load.running():
        yield load
    assert not load.wrong


def ask(client: CompletionClient, instance: str, what: str = "", **more: Any) -> Answer:
    """Return the answer to a request under an instance; with the fields that make it meet a fault."""
    body = FAULTS[what].body if what else {}
    return client.complete(prompt=PROMPT, max_tokens=MAX_TOKENS, kv_cache=instance, **body, **more)


def read_metric(text: str, name: str, instance: str) -> float:
    """Return a metric of an instance; the text of all of them takes long to parse."""
    found = re.search(rf'^{name}{{strategy="{instance}"}} (.*)$', text, re.MULTILINE)
    assert found, name
    return float(found[1])


# ---------------------------------------------------------------- calls that return
@dataclass(frozen=True)
class Found:
    """What requests under instances with faults were answered with, and what the server said of it afterwards."""

    answers: Mapping[str, Sequence[Answer]]  # by fault
    expected: Mapping[str, Answer]  # by fault: the answer of a strategy without one
    log: str
    metrics: str
    states: Mapping[str, str]  # by instance


class Operator(threading.Thread):
    """Reads what operators read, again and again."""

    def __init__(self, server: Server) -> None:
        super().__init__(name="operator", daemon=True)
        self._server = server
        self._stop_event = threading.Event()
        self.statuses: set[int] = set()

    def run(self) -> None:
        while not self._stop_event.wait(1.0):
            self.statuses |= {self._server.get(path).status_code for path in ("/metrics", "/v1/kv_cache", "/health")}

    def stop(self) -> None:
        self._stop_event.set()
        self.join(PATIENCE)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """Let requests meet all faults, a few at a time, while exact requests run and an operator watches."""
    with serving_faults(tmp_path_factory.mktemp("returning"), RETURNING, "64MiB") as server:
        engine = server.engine
        client = CompletionClient(server)
        expected = {name: ask(client, "contiguous", name) for name in select("quiet", "leaks", "none")}
        with under_load(client) as load, ThreadPoolExecutor(AT_ONCE) as pool:
            operator = Operator(server)
            operator.start()
            tasks = {name: pool.submit(meet, client, name) for name in RETURNING}
            answers = {name: task.result(PATIENCE) for name, task in tasks.items()}
            load.assert_goes_on()
            leaking = [get_instance(name) for name in select("leaks")]
            eventually(lambda: all(is_quarantined(server, name) for name in leaking))
            operator.stop()
            assert operator.statuses == {200}
            assert load.num_right > len(RETURNING)
        client.close()
        assert server.engine == engine, "the engine was started again"
        time.sleep(ANSWER_TTL)  # answers may be as old as that, older than the last quarantine
        caches = server.get("/v1/kv_cache").json()["data"]
        states = {each["name"]: each["state"] for each in caches}
        yield Found(answers, expected, server.output.read_text(), server.metrics(), states)


def meet(client: CompletionClient, what: str) -> list[Answer]:
    """Return the answers to requests that meet a fault: if it ends them, until the instance is in quarantine."""
    effect, instance = FAULTS[what].effect, get_instance(what)
    answers = [ask(client, instance, what)]
    if effect in ("ends", "stalls", "nan"):
        answers += [ask(client, instance, what, stream=stream) for stream in (True, False)]
    if effect in ("ends", "stalls") and answers[-1].code == "strategy_failed":
        answers.append(ask(client, instance, what))
    return answers


def is_quarantined(server: Server, instance: str) -> bool:
    return read_metric(server.get("/metrics").text, "kvmux_strategy_quarantined", instance) == 1


@pytest.mark.parametrize("what", select("ends", "stalls"))
def test_a_fault_ends_requests_of_its_strategy_with_an_error_that_names_it(found: Found, what: str) -> None:
    instance, method, answers = get_instance(what), FAULTS[what].method, found.answers[what]
    assert {each.code for each in answers} <= {"strategy_failed", "strategy_quarantined"}, answers
    assert all(f"cache strategy '{instance}'" in each.message for each in answers), answers
    assert f"failed in {method}()" in answers[0].message
    assert f"cache strategy '{instance}' failed in {method}()" in found.log
    assert read_metric(found.metrics, "kvmux_strategy_failures_total", instance) >= 3
    if method in CALLED_AFTER_A_STEP:
        return
    assert answers[-1].code == "strategy_quarantined"
    assert f"cache strategy '{instance}' is in quarantine" in found.log
    assert read_metric(found.metrics, "kvmux_strategy_quarantined", instance) == 1
    assert found.states[instance] == "quarantined"


@pytest.mark.parametrize("what", [name for name in select("quiet", "leaks") if name not in LACKING_MEMORY])
def test_a_fault_that_concerns_no_request_ends_none(found: Found, what: str) -> None:
    instance, method, answers = get_instance(what), FAULTS[what].method, found.answers[what]
    if method in CALLED_FOR_OTHERS and answers[0].code == "strategy_quarantined":
        assert f"cache strategy '{instance}' is in quarantine" in answers[0].message
    else:
        assert answers == [found.expected[what]]
    assert f"cache strategy '{instance}' failed in {method}()" in found.log
    assert read_metric(found.metrics, "kvmux_strategy_failures_total", instance) > 0


@pytest.mark.parametrize("what", select("nan", "none"))
def test_what_a_strategy_computes_stays_with_it(found: Found, what: str) -> None:
    instance, answers = get_instance(what), found.answers[what]
    if FAULTS[what].effect == "none":
        assert answers == [found.expected[what]]
        return
    assert {each.code for each in answers} == {"not_a_number"}
    assert all(f"cache strategy '{instance}'" in each.message for each in answers), answers
    assert f"cache strategy '{instance}'" in found.log
    assert found.states[instance] == "ok"


# ---------------------------------------------------------------- fallbacks
def test_a_fallback_answers_in_place_of_an_instance_at_fault(tmp_path: Path) -> None:
    """Neither the clients of the instance nor those of the fallback see an error, from the first fault on."""
    with serving_faults(tmp_path, FALLING_BACK, "64MiB", fallback="paged") as server:
        client, num_requests = CompletionClient(server), 5
        expected = ask(client, "paged")
        assert expected.code is None
        with under_load(client) as load:
            for what in FALLING_BACK:
                answers = [ask(client, get_instance(what), stream=i % 2 == 0) for i in range(num_requests)]
                assert answers == [expected] * num_requests
            load.assert_goes_on()
        client.close()
        for what in FALLING_BACK:
            instance = get_instance(what)
            answer = server.complete(prompt=PROMPT, max_tokens=1, kv_cache=instance)
            assert answer.headers["X-KV-Cache"] == "paged"
            assert answer.json()["kv_cache"]["instance"] == "paged"
            assert answer.json()["kv_cache"]["reason"] == f"fallback of {instance}"
            metrics = server.metrics()
            # NaN may be the model's, so it is answered by the fallback, request by request, and blamed on nobody
            assert metric(metrics, "kvmux_strategy_quarantined", strategy=instance) == (FAULTS[what].effect != "nan")
            count = metric(metrics, "kvmux_fallback_requests_total", strategy=instance, fallback="paged")
            assert count == num_requests + 1
        assert "'paged' serves its requests" in server.output.read_text()


# ---------------------------------------------------------------- too little memory, and calls that do not return
@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, CompletionClient, ExactLoad]]:
    faults = [*LACKING_MEMORY, *HANGING]
    with serving_faults(tmp_path_factory.mktemp("small"), faults, "2MiB") as server:
        client = CompletionClient(server)
        with under_load(client) as load:
            yield server, client, load
        client.close()


@pytest.mark.parametrize("what", HANGING)
def test_the_engine_starts_again_without_a_strategy_whose_call_does_not_return(
    small: tuple[Server, CompletionClient, ExactLoad], what: str
) -> None:
    server, client, load = small
    instance, method = get_instance(what), FAULTS[what].method
    load.allowed = {"engine_unavailable"}
    engine = server.engine
    if method != "usage":
        assert ask(client, instance, stream=True).code == "engine_unavailable"
    else:  # which the load or an operator has called already
        server.get("/v1/kv_cache")
    eventually(lambda: not engine.is_running())
    eventually(lambda: server.get("/ready").status_code == 200)
    answer = ask(client, instance)
    assert answer.code == "strategy_disabled"
    assert f"cache strategy '{instance}' is disabled: {method}() did not return" in answer.message
    log = server.output.read_text()
    assert f"cache strategy '{instance}': {method}() did not return" in log
    assert f"cache strategy '{instance}' is disabled until the server is started again" in log
    states = {each["name"]: each["state"] for each in server.get("/v1/kv_cache").json()["data"]}
    assert states[instance] == "disabled"
    assert server.get("/health").status_code == 200
    load.allowed = ()
    load.assert_goes_on()
    assert server.get("/metrics").status_code == 200


@pytest.mark.parametrize("what", LACKING_MEMORY)
def test_idle_memory_that_is_not_freed_is_no_fault_of_others(
    small: tuple[Server, CompletionClient, ExactLoad], what: str
) -> None:
    server, client, load = small
    engine, instance = server.engine, get_instance(what)
    answer = ask(client, instance)
    # If the request was preempted, its own blocks were idle, and the faults put its instance in quarantine
    assert answer == ask(client, "contiguous") or answer.code == "strategy_quarantined"
    fault = f"cache strategy '{instance}' failed in evict()"
    eventually(lambda: fault in server.output.read_text())  # /metrics calls usage(), which may not return here
    load.assert_goes_on()
    assert server.engine == engine

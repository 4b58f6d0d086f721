"""The client of several replicas retries and cancels requests, and asks all replicas; a script answers its calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import pytest

import server.cluster.client
from config.settings import Settings
from server.cluster.calls import ReplicaLost, group_by_prompt
from server.cluster.client import ClusterClient
from server.cluster.hints import HintMaker
from server.cluster.messages import (
    EngineGone,
    ReplicaAnswer,
    ReplicaInfo,
    Routed,
    decode_cancel,
    decode_payload,
    decode_submits,
    encode,
)
from server.engine.ipc.client import EngineLost, EngineRefused
from server.engine.ipc.messages import (
    Admitted,
    Answer,
    Cancel,
    Clear,
    Failed,
    Hello,
    Observed,
    PinCachedPrefix,
    SamplingParams,
    Strategy,
    Submit,
    Tokens,
    Unpin,
)

HELLO = Hello("tiny", [], 256, 320, [Strategy("paged", "paged", block_size=4, hash_root=b"root")])
Generate = Callable[["ScriptedCalls", dict[str, Any], Sequence[Submit]], AsyncGenerator[bytes, None]]


class ScriptedCalls:
    """Implements `ReplicaCalls`: replicas are names, and `generate` is a test's script."""

    def __init__(self, script: Generate | None = None, replicas: Sequence[str] = ("a", "b", "c")) -> None:
        self.replicas: dict[str, Hello | None] = dict.fromkeys(replicas, HELLO)
        self.script = script
        self.hints: list[dict[str, Any]] = []
        self.called: list[tuple[str, str, bytes]] = []
        self.closed = 0  # number of streams that ended before their script did
        self.hanging = set[str]()  # replicas that do not answer
        self.answers: Callable[[str, Any], Answer] = lambda replica, what: Answer(0, b"{}")

    async def generate(self, hint: dict[str, Any], payload: bytes) -> AsyncGenerator[bytes, None]:
        self.hints.append(hint)
        free = [id for id in self.replicas if id not in hint["avoid"]]
        hint["routed"] = {"replica": hint.get("replica") or free[0], "reason": "cached", "expected_cached_tokens": 4}
        assert self.script is not None
        try:
            async for item in self.script(self, hint, decode_submits(payload)):
                yield item
        except (asyncio.CancelledError, GeneratorExit):
            self.closed += 1
            raise

    async def call(self, method: str, replica: str, payload: bytes) -> bytes:
        if method != "describe":
            self.called.append((method, replica, payload))
        if replica not in self.replicas:
            raise ReplicaLost("gone", replica)
        if replica in self.hanging:
            await asyncio.Event().wait()
        if method == "describe":
            return encode(ReplicaInfo(replica, self.replicas[replica]))
        if method == "query":
            return encode(ReplicaAnswer(replica, self.answers(replica, decode_payload(payload))))
        return b""

    async def broadcast(self, method: str, payload: bytes, timeout: float) -> Sequence[bytes]:
        async with asyncio.timeout(timeout):
            return [await self.call(method, id, payload) for id in list(self.replicas)]

    async def list_replicas(self, timeout: float) -> Sequence[str]:
        return list(self.replicas)


def run(calls: ScriptedCalls, work: Callable[[ClusterClient], Any]) -> Any:
    """Run `work` with a client that knows the replicas."""

    async def main() -> Any:
        async with ClusterClient(calls, HintMaker(Settings())) as client:
            while client.hello is None:
                await asyncio.sleep(0.001)
            return await work(client)

    return asyncio.run(main())


def make_submit(request_id: str = "r-0", **fields: Any) -> Submit:
    return Submit(request_id, [1, 2, 3, 4, 5], SamplingParams(max_tokens=8), **fields)


async def complete(
    calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]
) -> AsyncGenerator[bytes, None]:
    """Answer each request with two tokens."""
    begin: list[Any] = [Routed(hint["routed"]["replica"], "cached", 4)]
    yield encode([*begin, *(Admitted(each.request_id, "paged", "default", 4) for each in submits)])
    yield encode([Tokens(each.request_id, [7, 8], "length") for each in submits])


def read_all(*submits: Submit) -> Callable[[ClusterClient], Any]:
    async def work(client: ClusterClient) -> list[Any]:
        async with client.stream(submits) as stream:
            return [event async for event in stream]

    return work


# ---------------------------------------------------------------- streams
def test_events_arrive_in_order() -> None:
    calls = ScriptedCalls(complete)
    events = run(calls, read_all(make_submit()))
    assert [type(each) for each in events] == [Admitted, Tokens]
    assert (calls.hints[0]["instance"], calls.hints[0]["num_tokens"], len(calls.hints[0]["names"])) == ("paged", 5, 1)
    assert calls.closed == 0
    assert not [each for each in calls.called if each[0] == "cancel"]


def test_each_prompt_is_routed_by_itself_and_its_choices_stay_together() -> None:
    submits = [
        make_submit("r-0-0"),
        make_submit("r-0-1", sibling_of="r-0-0"),
        make_submit("r-1-0"),
        make_submit("r-1-1", sibling_of="r-1-0"),
    ]
    assert [[each.request_id for each in group] for group in group_by_prompt(submits)] == [
        ["r-0-0", "r-0-1"],
        ["r-1-0", "r-1-1"],
    ]
    calls = ScriptedCalls(complete)
    events = run(calls, read_all(*submits))
    assert len(calls.hints) == 2
    assert sorted(each.request_id for each in events if isinstance(each, Tokens)) == sorted(
        each.request_id for each in submits
    )


@pytest.mark.parametrize("how", ["raises", "says so"])
def test_a_request_that_has_not_begun_is_tried_elsewhere(how: str) -> None:
    async def lose_first(calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]) -> Any:
        if hint["routed"]["replica"] in ("a", "b"):
            if how == "raises":
                raise ReplicaLost("it died")
            yield encode([Routed(hint["routed"]["replica"]), EngineGone("it starts")])
            return
        async for item in complete(calls, hint, submits):
            yield item

    calls = ScriptedCalls(lose_first)
    assert [type(each) for each in run(calls, read_all(make_submit()))] == [Admitted, Tokens]
    assert [each["avoid"] for each in calls.hints] == [[], ["a"], ["a", "b"]]


def test_a_request_that_no_replica_takes_fails() -> None:
    async def lose(calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]) -> Any:
        raise ReplicaLost("it died")
        yield b""

    calls = ScriptedCalls(lose, replicas="abcdef")
    with pytest.raises(EngineLost, match="it died"):
        run(calls, read_all(make_submit()))
    assert len(calls.hints) == 3


def test_a_request_that_has_begun_is_not_repeated() -> None:
    async def lose_late(calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]) -> Any:
        yield encode([Routed("a"), Admitted(submits[0].request_id, "paged", "default", 0)])
        raise ReplicaLost("it died")

    calls = ScriptedCalls(lose_late)
    with pytest.raises(EngineLost, match="it died"):
        run(calls, read_all(make_submit()))
    assert len(calls.hints) == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stream_that_a_replica_ends_too_early_is_a_loss(*, has_begun: bool) -> None:
    async def end_early(calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]) -> Any:
        if hint["routed"]["replica"] == "a":
            admitted = [Admitted(submits[0].request_id, "paged", "default", 0)]
            yield encode([Routed("a"), *(admitted if has_begun else [])])
            return
        async for item in complete(calls, hint, submits):
            yield item

    calls = ScriptedCalls(end_early)
    if has_begun:
        with pytest.raises(EngineLost, match="went away"):
            run(calls, read_all(make_submit()))
    else:
        assert [type(each) for each in run(calls, read_all(make_submit()))] == [Admitted, Tokens]


def test_an_unexpected_error_ends_the_request_alone() -> None:
    async def fail(calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]) -> Any:
        raise ValueError("a bug")
        yield b""

    (event,) = run(ScriptedCalls(fail), read_all(make_submit()))
    assert isinstance(event, Failed)
    assert event.status == 500


async def never_end(calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]) -> Any:
    yield encode([Routed("b"), *(Admitted(each.request_id, "paged", "default", 0) for each in submits)])
    await asyncio.Event().wait()


def test_leaving_a_stream_closes_its_calls() -> None:
    async def work(client: ClusterClient) -> None:
        async with client.stream([make_submit("r-0"), make_submit("r-1")]) as stream:
            await anext(stream)
            await anext(stream)
        await asyncio.sleep(0.01)

    calls = ScriptedCalls(never_end)
    run(calls, work)
    assert calls.closed == 2


def test_a_choice_that_is_stopped_is_ended_on_its_replica() -> None:
    """The others go on, so the stream is not closed; nor would a closed one send the record of an `explain`."""

    async def work(client: ClusterClient) -> None:
        submits = [make_submit("r-0"), make_submit("r-1", sibling_of="r-0")]
        async with client.stream(submits) as stream:
            await anext(stream)
            stream.cancel("r-1", "stop")
            await asyncio.sleep(0.01)
            assert [(method, replica) for method, replica, _ in calls.called] == [("cancel", "b")]
            assert decode_cancel(calls.called[0][2]) == Cancel("r-1", "stop")
            assert calls.closed == 0

    calls = ScriptedCalls(never_end)
    run(calls, work)
    assert calls.closed == 1


def test_a_cancel_that_comes_before_the_replica_is_known_is_sent_later() -> None:
    begin = asyncio.Event()

    async def wait(calls: ScriptedCalls, hint: dict[str, Any], submits: Sequence[Submit]) -> Any:
        await begin.wait()
        async for item in never_end(calls, hint, submits):
            yield item

    async def work(client: ClusterClient) -> None:
        submits = [make_submit("r-0"), make_submit("r-1", sibling_of="r-0")]
        async with client.stream(submits) as stream:
            stream.cancel("r-1")
            await asyncio.sleep(0.01)
            assert not calls.called
            begin.set()
            await anext(stream)
            await asyncio.sleep(0.01)
            assert [(method, replica) for method, replica, _ in calls.called] == [("cancel", "b")]

    calls = ScriptedCalls(wait)
    run(calls, work)


# ---------------------------------------------------------------- which replicas there are
def test_without_a_ready_replica_there_is_no_engine() -> None:
    async def work(client: ClusterClient) -> None:
        before = client.epoch
        calls.replicas = {"a": None, "b": HELLO}
        client._update([ReplicaInfo(id, hello) for id, hello in calls.replicas.items()])
        assert client.get_hello() == HELLO
        assert client.epoch is not before, "answers kept from before are out of date"
        one = client.get_replica("a")
        assert one is not None
        with pytest.raises(EngineLost):
            one.get_hello()
        assert client.get_replica("c") is None
        client._update([])
        with pytest.raises(EngineLost):
            client.get_hello()

    calls = ScriptedCalls()
    run(calls, work)


def test_instances_of_all_replicas_can_be_asked_for() -> None:
    other = msgspec.structs.replace(HELLO, strategies=[*HELLO.strategies, Strategy("new", "paged")])

    async def work(client: ClusterClient) -> None:
        client._update([ReplicaInfo("a", HELLO), ReplicaInfo("b", other)])
        assert [each.name for each in client.get_hello().strategies] == ["paged", "new"]

    run(ScriptedCalls(), work)


def test_requests_of_one_replicas_client_go_there() -> None:
    async def work(client: ClusterClient) -> None:
        one = client.get_replica("c")
        assert one is not None
        async with one.stream([make_submit()]) as stream:
            assert [event async for event in stream]
        assert calls.hints[0]["replica"] == "c"
        await one.query("live")
        assert calls.called[-1][:2] == ("query", "c")

    calls = ScriptedCalls(complete)
    run(calls, work)


def test_counts_that_do_not_arrive_are_sent_again() -> None:
    async def work(client: ClusterClient) -> None:
        client.replicas = {"z": HELLO}  # it has just ended
        client.send_observed(Observed({200: 3}, 1000, {"regex": 1}, {"invalid": 2}))
        await asyncio.sleep(0.01)
        client.replicas = {"a": HELLO}
        client.send_observed(Observed({200: 1, 404: 2}, 1000, {"regex": 1, "tools": 1}))
        await asyncio.sleep(0.01)

    calls = ScriptedCalls()
    run(calls, work)
    sent = [
        msgspec.msgpack.decode(payload, type=Observed) for method, _, payload in calls.called if method == "observe"
    ]
    assert sent[-1].responses == {200: 4, 404: 2}
    assert (sent[-1].constraints, sent[-1].refusals) == ({"regex": 2, "tools": 1}, {"invalid": 2})


# ---------------------------------------------------------------- commands and questions
def query(calls: ScriptedCalls, what: Any) -> Any:
    return json.loads(run(calls, lambda client: client.query(what)))


def test_a_command_that_all_refuse_is_refused() -> None:
    calls = ScriptedCalls()
    calls.answers = lambda *_: Answer(0, b"", Failed("", 404, "unknown", "not_found"))
    with pytest.raises(EngineRefused, match="unknown"):
        query(calls, Clear("paged"))


def test_a_pin_names_its_replicas_and_is_removed_there() -> None:
    calls = ScriptedCalls()
    calls.answers = lambda replica, _: Answer(0, json.dumps({"id": f"pin-{replica}", "deleted": True}).encode())
    pinned = query(calls, PinCachedPrefix("paged", "some", 60.0))
    assert pinned["id"] == "a:pin-a,b:pin-b,c:pin-c"
    calls.called.clear()
    query(calls, Unpin("paged", "c:pin-c,a:pin-a,gone:pin-1"))
    assert [(replica, decode_payload(payload)) for _, replica, payload in calls.called] == [
        ("c", Unpin("paged", "pin-c")),
        ("a", Unpin("paged", "pin-a")),
    ]
    with pytest.raises(EngineRefused, match="no pin"):
        query(calls, Unpin("paged", "pin-1"))


# ---------------------------------------------------------------- replicas that hang, start and join
@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the client wait for hundredths of the seconds."""
    for name in ("WATCH_INTERVAL", "START_TIMEOUT", "SLOW_AFTER", "COMMAND_TIMEOUT"):
        monkeypatch.setattr(f"server.cluster.client.{name}", getattr(server.cluster.client, name) / 100)


@pytest.mark.usefixtures("hasty")
def test_a_replica_that_hangs_does_not_take_the_others_away() -> None:
    async def work(client: ClusterClient) -> Any:
        calls.hanging = {"b"}
        while client.replicas["b"] is not None:
            await asyncio.sleep(0.001)
        assert client.replicas == {"a": HELLO, "b": None, "c": HELLO}
        assert client.hello == HELLO
        answer = json.loads(await client.query(Clear("paged")))
        calls.hanging.clear()
        while client.replicas["b"] is None:
            await asyncio.sleep(0.001)
        return answer

    calls = ScriptedCalls()
    calls.answers = lambda *_: Answer(0, b'{"freed_bytes": 1}')
    answer = run(calls, work)
    assert answer["freed_bytes"] == 2
    assert "did not answer" in answer["replicas"]["b"]["error"]["message"]


@pytest.mark.usefixtures("hasty")
def test_a_client_that_starts_beside_a_replica_that_hangs_serves_by_the_others() -> None:
    calls = ScriptedCalls(complete)
    calls.hanging = {"b"}

    async def work(client: ClusterClient) -> list[Any]:
        assert client.replicas == {"a": HELLO, "b": None, "c": HELLO}
        return await read_all(make_submit())(client)

    assert [type(each) for each in run(calls, work)] == [Admitted, Tokens]


@pytest.mark.usefixtures("hasty")
def test_a_replica_without_an_engine_beside_one_that_hangs_is_not_ready() -> None:
    async def work(client: ClusterClient) -> None:
        calls.hanging, calls.replicas["b"] = {"a"}, None
        while client.hello is not None:
            await asyncio.sleep(0.001)
        assert client.replicas == {"a": None, "b": None}

    calls = ScriptedCalls(replicas=("a", "b"))
    run(calls, work)


@pytest.mark.usefixtures("hasty")
def test_replicas_stay_known_if_none_answers_in_time() -> None:
    """It is more likely that this process, or its machine, is busy."""

    async def work(client: ClusterClient) -> None:
        calls.hanging = set("abc")
        await asyncio.sleep(0.2)
        assert client.replicas == dict.fromkeys("abc", HELLO)

    calls = ScriptedCalls()
    run(calls, work)


@pytest.mark.usefixtures("hasty")
def test_a_client_has_started_once_a_replica_is_ready() -> None:
    async def main(delay: float) -> Hello | None:
        calls = ScriptedCalls(replicas=())
        asyncio.get_running_loop().call_later(delay, calls.replicas.update, {"a": HELLO})
        async with ClusterClient(calls, HintMaker(Settings())) as client:
            return client.hello

    assert asyncio.run(main(0.03)) == HELLO
    assert asyncio.run(main(60.0)) is None, "it starts without any, too"


def test_a_replica_that_joins_meanwhile_gets_a_command() -> None:
    def answer(replica: str, what: Any) -> Answer:
        calls.replicas["d"] = HELLO
        return Answer(0, b'{"freed_bytes": 1}')

    calls = ScriptedCalls()
    calls.answers = answer
    assert query(calls, Clear("paged"))["freed_bytes"] == 4

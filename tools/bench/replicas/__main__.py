"""`python -m tools.bench.replicas`: several replicas on Ray Serve beside one server with as much KV memory.

    chats     chats of several tenants, by the router, in turn over the replicas (round robin), and on one server:
              prompt tokens computed, whether the router's expectations came true, load by replica, time to first token
    overhead  what Ray adds to a stream: one replica beside a server alone, by turns

Needs a Python with kvmux[ray] (--python); servers and clusters are started one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from server.listening import listen
from server.profiling.running import RunError, start_process
from tools.compare_checkouts import compute_interval

START_TIMEOUT = 120.0  # seconds that a server or a cluster may take to become ready
TIMEOUT = 120.0  # seconds that a request may take
SETTLE = 3.0  # seconds between two rounds, in which replicas report and routers forget
COMMON = ("--threads", "1", "--max-num-seqs", "16", "--log-level", "warning", "--admin-token", "bench-token")
ADMIN = {"authorization": "Bearer bench-token"}
WORDS = ("king", "river", "old", "boat", "market", "winter", "seven", "garden", "letter", "stone", "bread", "night")


@dataclass(frozen=True)
class Answer:
    """A streamed answer, with what the server said of its prompt."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int | None  # cached tokens that the router expected; None: there is no router
    output_tokens: int
    replica: str
    first_token: float  # seconds from sending the request
    gaps: Sequence[float]  # seconds between events of the stream
    turn: tuple[int, int] = (0, 0)  # number of the chat, and of the turn in it

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass
class Round:
    """What one way of serving all chats has given."""

    answers: list[Answer] = field(default_factory=list)

    def summarize(self) -> dict[str, Any]:
        load: Counter[str] = Counter()
        for each in self.answers:
            load[each.replica] += each.computed_tokens + each.output_tokens
        expected = [
            each.expected_tokens == each.cached_tokens for each in self.answers if each.expected_tokens is not None
        ]
        return {
            "requests": len(self.answers),
            "prompt_tokens": sum(each.prompt_tokens for each in self.answers),
            "computed_tokens": sum(each.computed_tokens for each in self.answers),
            "right_expectations": sum(expected) / len(expected) if expected else None,
            "load_max_over_mean": max(load.values()) / statistics.mean(load.values()) if len(load) > 1 else None,
            "ttft_p50": statistics.median(each.first_token for each in self.answers),
            "ttft_p95": statistics.quantiles((each.first_token for each in self.answers), n=20)[-1],
        }

    def times_by_turn(self) -> dict[tuple[int, int], float]:
        """Return the seconds to the first token of each turn."""
        return {each.turn: each.first_token for each in self.answers}


def compare(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of (ours, theirs), of their ratios and of their differences, with 95 % intervals."""
    ratios, differences = [ours / theirs for ours, theirs in pairs], [ours - theirs for ours, theirs in pairs]
    return {
        "pairs": len(pairs),
        "ours": statistics.median(ours for ours, _ in pairs),
        "theirs": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "ratio_interval": compute_interval(ratios),
        "difference": statistics.median(differences),
        "difference_interval": compute_interval(differences),
    }


# ---------------------------------------------------------------- servers
@contextmanager
def serving(python: str, *arguments: str) -> Iterator[str]:
    """Run a command of kvmux until the block ends; yield its URL."""
    with listen("127.0.0.1", 0) as probe:
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "server", *arguments, "--port", str(port), *COMMON]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.getcwd()}
    with start_process(command, env=environment, stdout=sys.stderr) as process:
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_ready(url, arguments):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"{' '.join(command)} did not become ready")
            time.sleep(0.2)
        time.sleep(SETTLE)
        yield url


def _is_ready(url: str, arguments: Sequence[str]) -> bool:
    try:
        if httpx.get(f"{url}/ready").status_code != 200:
            return False
        if arguments[0] != "ray":
            return True
        wanted = int(arguments[arguments.index("--replicas") + 1])
        return len(list_replicas(url)) == wanted
    except httpx.TransportError:
        return False


def list_replicas(url: str) -> list[str]:
    return [each["id"] for each in httpx.get(f"{url}/v1/replicas").json()["data"] if each["ready"]]


def clear(url: str) -> None:
    httpx.post(f"{url}/v1/kv_cache/paged/clear", headers=ADMIN, timeout=TIMEOUT).raise_for_status()
    time.sleep(SETTLE + 2.0)


# ---------------------------------------------------------------- clients
async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Answer:
    """Stream a chat completion, and return it. Raises RunError for an error."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "explain": True, "temperature": 0}
    sent, times, text, last = time.perf_counter(), list[float](), "", dict[str, Any]()
    usage: dict[str, Any] = {}
    async with client.stream("POST", path, json=body) as response:
        async for event in _iter_events(response):
            if "error" in event:
                raise RunError(f"a request failed: {event['error']}")
            usage = event.get("usage") or usage
            if not event["choices"]:
                continue
            choice = event["choices"][0]
            if content := choice["delta"].get("content"):
                text += content
                times.append(time.perf_counter())
            last = choice.get("kv_cache") or last
    routed = last.get("routed") or {}
    return Answer(
        text,
        usage["prompt_tokens"],
        last["cached_tokens"],
        routed.get("expected_cached_tokens"),
        usage["completion_tokens"],
        routed.get("replica", ""),
        times[0] - sent if times else time.perf_counter() - sent,
        [after - before for before, after in pairwise(times)],
    )


async def _iter_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    if response.status_code != 200:
        raise RunError(f"a request was answered {response.status_code}: {(await response.aread()).decode()[:300]}")
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@dataclass(frozen=True)
class Plan:
    """The chats: each tenant has a beginning of its own, and each turn repeats the whole chat before it."""

    tenants: int
    chats: int
    turns: int
    output_tokens: int
    pause: float  # mean seconds between an answer and the next turn
    beginning_words: int  # of the system prompt, which a tenant's chats have in common
    seed: int

    async def run(self, url: str, choose_path: Callable[[], str]) -> Round:
        """Run all chats; `choose_path` returns the beginning of the path for each request."""
        draw, found = random.Random(self.seed), Round()
        beginnings = [_make_text(draw, self.beginning_words) for _ in range(self.tenants)]
        seeds = [draw.randrange(1 << 32) for _ in range(self.chats)]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:
            await asyncio.gather(
                *(
                    self._chat(client, choose_path, i, beginnings[i % self.tenants], random.Random(each), found)
                    for i, each in enumerate(seeds)
                )
            )
        return found

    async def _chat(
        self,
        client: httpx.AsyncClient,
        choose_path: Callable[[], str],
        chat: int,
        beginning: str,
        draw: random.Random,
        found: Round,
    ) -> None:
        messages = [{"role": "system", "content": beginning}]
        await asyncio.sleep(draw.uniform(0, 4 * self.pause))
        for turn in range(self.turns):
            messages.append({"role": "user", "content": _make_text(draw, draw.randrange(8, 30))})
            body = {
                "messages": messages,
                "max_tokens": self.output_tokens,
                "cache_salt": f"tenant {chat % self.tenants}",
            }
            answer = await ask(client, f"{choose_path()}/v1/chat/completions", body)
            found.answers.append(replace(answer, turn=(chat, turn)))
            messages.append({"role": "assistant", "content": answer.text})
            await asyncio.sleep(draw.expovariate(1 / self.pause))


def _make_text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


# ---------------------------------------------------------------- measurements
def measure_chats(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all three ways, each round's and, for times, the intervals of the same turns."""
    plan = Plan(**{each.name: getattr(options, each.name) for each in fields(Plan)})
    kv = f"{options.kv_mebibytes}MiB"
    model = ("--model", options.model)
    rounds: dict[str, list[dict[str, Any]]] = {"router": [], "round robin": [], "one server": []}
    pairs: list[tuple[float, float]] = []  # seconds to the first token of the same turn: by the router, and in turn
    with serving(options.python, "ray", "up", "--replicas", str(options.replicas), "--kv-memory", kv, *model) as url:
        ids = list_replicas(url)
        turn = _take_turns([f"/replicas/{id}" for id in ids])
        for i in range(options.rounds):
            ways: list[tuple[str, Callable[[], str]]] = [("router", lambda: ""), ("round robin", turn)]
            times: dict[str, dict[tuple[int, int], float]] = {}
            for name, choose in ways if i % 2 == 0 else ways[::-1]:
                clear(url)
                found = asyncio.run(plan.run(url, choose))
                times[name] = found.times_by_turn()
                rounds[name].append(found.summarize())
                print(name, rounds[name][-1], file=sys.stderr, flush=True)
            pairs += [(seconds, times["round robin"][key]) for key, seconds in times["router"].items()]
    total = f"{options.kv_mebibytes * options.replicas}MiB"
    with serving(sys.executable, "serve", "--kv-memory", total, *model) as url:
        clear(url)
        rounds["one server"].append(asyncio.run(plan.run(url, lambda: "")).summarize())
        print("one server", rounds["one server"][-1], file=sys.stderr, flush=True)
    figures = {
        "plan": vars(plan),
        "model": Path(options.model).name,
        "replicas": options.replicas,
        "kv_memory": kv,
        "rounds": rounds,
    }
    return figures | {"ttft_router_and_round_robin": compare(pairs)}


def _take_turns(paths: Sequence[str]) -> Callable[[], str]:
    counter = iter(range(1 << 62))
    return lambda: paths[next(counter) % len(paths)]


def measure_overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Return times of single streams on one replica behind Ray beside a server alone; both run at once, by turns."""
    kv = f"{options.kv_mebibytes}MiB"
    pairs: dict[str, list[tuple[float, float]]] = {"ttft": [], "itl": []}
    with (
        serving(options.python, "ray", "up", "--replicas", "1", "--kv-memory", kv) as behind,
        serving(sys.executable, "serve", "--kv-memory", kv) as alone,
    ):
        for i in range(options.streams + 2):
            body = {"messages": [{"role": "user", "content": f"{i} river"}], "max_tokens": 64}
            urls = (behind, alone) if i % 2 else (alone, behind)
            answers = {url: asyncio.run(_ask_once(url, body)) for url in urls}
            if i >= 2:  # the first ones warm up
                ours, theirs = answers[behind], answers[alone]
                pairs["ttft"].append((ours.first_token, theirs.first_token))
                pairs["itl"].append((_mean_gap(ours), _mean_gap(theirs)))
    return {name: compare(each) for name, each in pairs.items()}


def _mean_gap(answer: Answer) -> float:
    """Return the mean seconds between two tokens; events may have several."""
    return sum(answer.gaps) / (answer.output_tokens - 1)


async def _ask_once(url: str, body: Mapping[str, Any]) -> Answer:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        return await ask(client, "/v1/chat/completions", body)


MEASUREMENTS = {"chats": measure_chats, "overhead": measure_overhead}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.replicas", description=__doc__)
    add = parser.add_argument
    add("what", nargs="*", choices=(*MEASUREMENTS, []), help="what to measure (default: all)")
    add("--python", default=sys.executable, help="a Python that has kvmux[ray] (default: this one)")
    add("--replicas", type=int, default=4)
    add("--kv-mebibytes", type=int, default=24, help="KV memory of a replica (default: 24)")
    add("--tenants", type=int, default=8)
    add("--chats", type=int, default=32)
    add("--turns", type=int, default=6)
    add("--output-tokens", type=int, default=16)
    add("--pause", type=float, default=2.0, help="mean seconds between an answer and the next turn (default: 2)")
    add("--beginning-words", type=int, default=120, help="of the prompt that a tenant's chats share (default: 120)")
    add("--model", default="tiny", help="for chats: what kvmux serve --model takes (default: tiny)")
    add("--rounds", type=int, default=3, help="rounds of the router and of round robin (default: 3)")
    add("--streams", type=int, default=40, help="streams of each kind for the overhead (default: 40)")
    add(
        "--seed",
        type=int,
        default=random.randrange(1 << 32),
        help="of the chats' texts (default: another one each time)",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(arguments)
    found = {name: MEASUREMENTS[name](options) for name in options.what or MEASUREMENTS}
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

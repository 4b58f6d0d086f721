"""`python -m tools.bench.page`: what the page at /ui costs a server, and how smoothly it follows a large one.

- Throughput: a server answers a fixed number of requests, in turns with and without a reader of the live events that
  the page reads. The reader stands for a browser on another machine: on this one it would take the processor's time.
- Paint: the time from opening the page to its first paint, and to the squares of the blocks that the server holds.
- Frames: the times between frames while the page shows a made-up state of many blocks and requests, which all change.

The last two need Debian's Chromium (`make chromium`) and playwright (`pip install "kvmux[test]"`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, cast

import httpx
import msgspec
import numpy as np
import uvicorn
from fastapi import FastAPI
from rich.console import Console

from cache_strategies.types import BlockState
from server.api.ops import live
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Answer, get_answer_ttl
from server.engine.live.blocks import encode_bytes
from server.ui.files import mount_ui
from tools.bench.table.models import SHAPES, cache_folder, make_model
from tools.compare_checkouts import compute_interval
from tools.serving import THIS_CHECKOUT, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

VIEWS = ("memory", "requests", "rates")
INSTANCES = ("paged", "int8", "window", "compressed")  # of the made-up state
BLOCK_BYTES = 1 << 16  # of the made-up state
# Returns the times of all frames of some seconds, in milliseconds
RECORD_FRAMES = """(seconds) => new Promise((resolve) => {
  const times = [];
  const end = performance.now() + seconds * 1000;
  const note = (now) => { times.push(now); now < end ? requestAnimationFrame(note) : resolve(times); };
  requestAnimationFrame(note);
})"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.page", description=__doc__)
    add = parser.add_argument
    add("--model", default="tiny", help=f"as for `kvmux serve`, or one of {', '.join(SHAPES)}")
    add("--pairs", type=int, default=20, help="pairs of turns, with and without a reader; 0: measure no throughput")
    add("--requests", type=int, default=64, help="requests of a turn")
    add("--streams", type=int, default=8, help="requests that are served at the same time")
    add("--tokens", type=int, default=64, help="tokens of each answer")
    add("--blocks", type=int, default=10_000, help="blocks of the made-up state")
    add("--listed", type=int, default=500, help="requests of the made-up state")
    add("--seconds", type=float, default=15.0, help="seconds for which frames are noted, in each view")
    options = parser.parse_args(arguments)
    model = str(make_model(SHAPES[options.model], cache_folder(), print)) if options.model in SHAPES else options.model
    with Console(stderr=True).status("starting") as status:
        flags = ["--model", model, "--kv-memory", "512MiB"]
        with serving(THIS_CHECKOUT, flags) as server:
            if options.pairs:
                print_throughput(asyncio.run(measure_throughput(server.url, options, status.update)))
            status.update("opening the page")
            print_paints([measure_paint(server.url) for _ in range(10)])
        with serving_made_up_state(options.blocks, options.listed) as url:
            for view in VIEWS:
                status.update(f"noting frames of {view}")
                print_frames(view, measure_frames(url, view, options.seconds))
    return 0


# ---------------------------------------------------------------- throughput
async def measure_throughput(
    url: str, options: argparse.Namespace, report: Callable[[str], None]
) -> list[tuple[float, float]]:
    """Return the tokens a second of each pair of turns: without and with a reader. The order alternates."""
    pairs = []
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        for i in range(options.pairs + 1):
            report(f"pair {i} of {options.pairs}")
            speeds = {}
            for is_read in (False, True) if i % 2 else (True, False):
                async with reading_events(client) if is_read else contextlib.nullcontext():
                    speeds[is_read] = await take_turn(client, options)
            if i:  # the first pair is a warm-up
                pairs.append((speeds[False], speeds[True]))
    return pairs


@contextlib.asynccontextmanager
async def reading_events(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Read the live events, as the page does, until the block ends."""

    async def read() -> None:
        async with client.stream("GET", "/v1/live/events") as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_raw():
                pass

    task = asyncio.create_task(read())
    try:
        yield
        assert not task.done(), "the events have ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def take_turn(client: httpx.AsyncClient, options: argparse.Namespace) -> float:
    """Send a turn's requests, `streams` at a time; return the tokens a second."""
    free = asyncio.Semaphore(options.streams)

    async def send() -> None:
        prompt = [random.randrange(100, 1000) for _ in range(64)]
        body = {"prompt": prompt, "max_tokens": options.tokens, "ignore_eos": True, "temperature": 0}
        async with free:
            (await client.post("/v1/completions", json=body)).raise_for_status()

    began = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(options.requests)))
    return float(options.requests * options.tokens / (time.perf_counter() - began))


def print_throughput(pairs: Sequence[tuple[float, float]]) -> None:
    ratios = [read / alone for alone, read in pairs]
    low, high = compute_interval(ratios)
    print(f"tokens a second, without a reader: {median(alone for alone, _ in pairs):,.0f}")
    print(f"with a reader, of that: {median(ratios):.3f} (95 %: {low:.3f} to {high:.3f}), {len(pairs)} pairs")


# ---------------------------------------------------------------- the page
@contextlib.contextmanager
def open_page(url: str, ready: str) -> Iterator[Page]:
    """Open an address in a new Chromium, and wait until there is an element `ready`."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("there is no chromium: `make chromium` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.goto(url)
        page.wait_for_selector(ready)
        yield page
        browser.close()


def measure_paint(url: str) -> tuple[float, float]:
    """Return the milliseconds from opening the page to its first paint, and to the squares of blocks."""
    with open_page(f"{url}/ui/", "canvas") as page:
        blocks = page.evaluate("performance.now()")
        first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        return float(first), float(blocks)


def print_paints(paints: Sequence[tuple[float, float]]) -> None:
    first, blocks = (sorted(column) for column in zip(*paints, strict=True))
    print(f"first paint: {median(first):.0f} ms, at most {first[-1]:.0f} ms")
    print(f"with the blocks: {median(blocks):.0f} ms, at most {blocks[-1]:.0f} ms")


def measure_frames(url: str, view: str, seconds: float) -> list[float]:
    """Return the milliseconds between frames of a view, once it has been shown for some seconds."""
    with open_page(f"{url}/ui/#{view}", "main table") as page:
        page.wait_for_timeout(3000)
        times = page.evaluate(RECORD_FRAMES, seconds)
        return [after - before for before, after in itertools.pairwise(times)]


def print_frames(view: str, frames: Sequence[float]) -> None:
    p95 = quantiles(frames, n=20)[-1]
    print(
        f"{view}: {len(frames)} frames, 95 % within {p95:.1f} ms, median {median(frames):.1f}, most {max(frames):.0f}"
    )


# ---------------------------------------------------------------- a made-up server
class MadeUpEngine:
    """Answers the question "live" in place of an engine, with a state in which everything changes each time."""

    epoch: object = None

    def __init__(self, blocks: int, requests: int) -> None:
        self._blocks = blocks
        self._requests = requests
        self._count = 0

    def get_hello(self) -> None:
        """Do nothing, as a connected client has no error to raise."""

    async def send_query(self, _: str) -> Answer:
        self._count += 1
        state = make_state(self._blocks, self._requests, self._count)
        return Answer(0, msgspec.json.encode(state), created_at=time.monotonic() - get_answer_ttl("live"))


def make_state(blocks: int, requests: int, count: int) -> dict[str, Any]:
    """Return a live state as GET /v1/live has it; `count` is how many came before."""
    num_bytes = blocks * BLOCK_BYTES
    return {
        "object": "live",
        "created": time.time(),
        "memory": {
            "bytes": num_bytes,
            "warm_bytes": num_bytes,
            "free_bytes": 0,
            "weight_bytes": num_bytes // 2,
        },
        "block_states": [state.name.lower() for state in BlockState],
        "regions": make_regions(blocks, count),
        "instances": dict.fromkeys(INSTANCES, make_instance(num_bytes, requests, count)),
        "totals": make_totals(count),
        "num_running": requests // 2,
        "num_waiting": requests // 2,
        "max_num_seqs": requests,
        "requests": {f"0/{i}": make_request(i, count) for i in range(requests)},
    }


def make_regions(blocks: int, count: int) -> dict[str, Any]:
    """Return a region of each instance, with an equal number of the blocks."""
    draw, held = np.random.default_rng(count), blocks // len(INSTANCES)
    return {
        f"{name}/0": {
            "instance": name,
            "what": "keys and values",
            "block_bytes": BLOCK_BYTES,
            "held_blocks": held,
            "blocks_per_cell": 1,
            "states": encode_bytes(draw.integers(BlockState.IDLE, len(BlockState), held, np.uint8)),
        }
        for name in INSTANCES
    }


def make_instance(num_bytes: int, requests: int, count: int) -> dict[str, Any]:
    used, idle = num_bytes // 8, BLOCK_BYTES * count
    return {
        "kind": "paged",
        "state": "ok",
        "usage": {"seats": requests // 4, "tokens": 10_000 + count, "used": used, "idle": idle, "wasted": 0},
        "floor_bytes": 0,
        "limit_bytes": num_bytes,
        "kept_tokens": 10_000 + count,
        "dropped_tokens": 0,
        "fits": {str(256 << i): 1000 >> i for i in range(6)},
        "running": requests // 8,
        "waiting": requests // 8,
    }


def make_totals(count: int) -> dict[str, Any]:
    counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions"), count * 100)
    times = {name: [count * 3] * 12 for name in ("time_to_first_token", "inter_token_latency")}
    totals = {**counts, **times, "evicted_bytes": count * BLOCK_BYTES}
    return {
        "bounds": {name: [0.001 * 2**i for i in range(11)] for name in times},
        "instances": dict.fromkeys(INSTANCES, totals),
    }


def make_request(index: int, count: int) -> dict[str, Any]:
    return {
        "id": f"{index:032x}",
        "instance": INSTANCES[index % len(INSTANCES)],
        "reason": "request",
        "state": "running" if index % 2 else "waiting",
        "priority": 0,
        "prompt_tokens": 2000,
        "computed_tokens": count * 7 % 2000,
        "cached_tokens": 500,
        "generated_tokens": count,
        "max_tokens": 4000,
        "preemptions": 0,
        "seconds": count / 2,
        "time_to_first_token": 0.25,
    }


@contextlib.contextmanager
def serving_made_up_state(blocks: int, requests: int) -> Iterator[str]:
    """Serve the page and a made-up state from a thread; yield the address."""
    app = FastAPI()
    client = cast("EngineClient", MadeUpEngine(blocks, requests))
    state = live.LiveState(client)
    app.include_router(live.router(state, client))
    app.add_api_route("/ready", lambda: {"model": "made up"})
    mount_ui(app)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            state.stop()
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    sys.exit(main())

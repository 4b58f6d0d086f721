"""`python -m tools.bench.replicas [WHAT ...]`: measures several replicas on Ray Serve beside one server.

    chats     chats of several tenants, by the router, by round robin over the replicas, and on one server with as much
              KV memory: prompt tokens computed, right expectations of the router, load by replica, time to first token
    overhead  what Ray adds to a stream: one replica behind Ray and a server alone, by turns

Needs a Python with kvmux[ray] (--python), and runs the servers and clusters itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import cycle
from pathlib import Path
from typing import Any

from tools.bench.replicas.chats import ChatLoad, Round
from tools.bench.replicas.servers import clear, list_replicas, serving
from tools.bench.replicas.stream import Answer, ask_once
from tools.compare_checkouts import compute_interval


def measure_chats(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each round by the router, by round robin and on one server, and compare times by turns."""
    load = ChatLoad(**{each.name: getattr(options, each.name) for each in fields(ChatLoad)})
    rounds = _serve_by_replicas(load, options)
    one_server = _serve_by_one_server(load, options)
    times = [{way: each.times_by_turn() for way, each in ways.items()} for ways in rounds]
    return {
        "plan": vars(load),
        "model": Path(options.model).name,
        "replicas": options.replicas,
        "kv_memory": f"{options.kv_mebibytes}MiB",
        "rounds": {
            "router": [ways["router"].summarize() for ways in rounds],
            "round robin": [ways["round robin"].summarize() for ways in rounds],
            "one server": [one_server.summarize()],
        },
        "ttft_router_and_round_robin": _compare(
            [(seconds, each["round robin"][turn]) for each in times for turn, seconds in each["router"].items()]
        ),
    }


def _serve_by_replicas(load: ChatLoad, options: argparse.Namespace) -> list[dict[str, Round]]:
    """Serve all chats by the router and by round robin, in turn in either order; return each round's answers."""
    rounds = []
    kv_memory = f"{options.kv_mebibytes}MiB"
    command = ("ray", "up", "--replicas", str(options.replicas), "--kv-memory", kv_memory, "--model", options.model)
    with serving(options.python, *command) as url:
        replicas = cycle(list_replicas(url))
        ways: dict[str, Callable[[], str]] = {
            "router": lambda: "",
            "round robin": lambda: f"/replicas/{next(replicas)}",
        }
        for i in range(options.rounds):
            order = [*ways] if i % 2 == 0 else [*reversed(ways)]
            rounds.append({way: _serve(way, load, url, ways[way]) for way in order})
    return rounds


def _serve_by_one_server(load: ChatLoad, options: argparse.Namespace) -> Round:
    """Serve all chats by one server, which has as much KV memory as all replicas together."""
    kv_memory = f"{options.kv_mebibytes * options.replicas}MiB"
    with serving(sys.executable, "serve", "--kv-memory", kv_memory, "--model", options.model) as url:
        return _serve("one server", load, url, lambda: "")


def _serve(way: str, load: ChatLoad, url: str, choose_path: Callable[[], str]) -> Round:
    """Serve all chats from an empty cache, and print the figures."""
    clear(url)
    answers = asyncio.run(load.run(url, choose_path))
    print(way, answers.summarize(), file=sys.stderr, flush=True)
    return answers


def _compare(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
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


def measure_overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the times of single streams, sent by turns to one replica behind Ray and to a server alone."""
    kv = f"{options.kv_mebibytes}MiB"
    pairs: dict[str, list[tuple[float, float]]] = {"ttft": [], "itl": []}
    with (
        serving(options.python, "ray", "up", "--replicas", "1", "--kv-memory", kv) as behind,
        serving(sys.executable, "serve", "--kv-memory", kv) as alone,
    ):
        for i in range(options.streams + 2):
            body = {"messages": [{"role": "user", "content": f"{i} river"}], "max_tokens": 64}
            urls = (behind, alone) if i % 2 else (alone, behind)
            answers = {url: asyncio.run(ask_once(url, body)) for url in urls}
            if i >= 2:  # the first ones warm up
                ours, theirs = answers[behind], answers[alone]
                pairs["ttft"].append((ours.first_token, theirs.first_token))
                pairs["itl"].append((_mean_gap(ours), _mean_gap(theirs)))
    return {name: _compare(each) for name, each in pairs.items()}


def _mean_gap(answer: Answer) -> float:
    """Return the mean seconds between two tokens; events may have several."""
    return sum(answer.gaps) / (answer.output_tokens - 1)


MEASUREMENTS = {"chats": measure_chats, "overhead": measure_overhead}


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="*", choices=(*MEASUREMENTS, []), metavar="WHAT", help="chats, overhead (default: both)")
    add("--python", default=sys.executable, help="a Python that has kvmux[ray] (default: this one)")
    add("--replicas", type=int, default=4)
    add("--kv-mebibytes", type=int, default=24, help="KV memory of a replica (default: 24)")
    add("--tenants", type=int, default=8, help="whose chats share a system prompt (default: 8)")
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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _make_parser().parse_args(arguments)
    found = {name: MEASUREMENTS[name](options) for name in options.what or MEASUREMENTS}
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks and measures the Metal kernels on an NVIDIA GPU, in at most eight minutes.

`python -m tests.kernels.cuda.gpu_check` prints a line of JSON for each result, and appends it to gpu_check.jsonl in the
folder $OUT, if that is set. Each part runs in a process of its own and for a bounded time, so that a fault in one does
not stop the others. `--device cpu` tries the same with small sizes on a CPU, which runs the translated kernels as C++
(host_kernels.py).

Needs torch, numpy, pytest and gguf, for the part `engine` also what kvmux needs, and for the parts of the sanitizer
NVIDIA's compute-sanitizer; a part without what it needs says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import torch

from tests.kernels.cuda.gpu_check import MODULE
from tests.kernels.cuda.gpu_check.correctness import (
    check_attention,
    check_engine,
    check_mutants,
    check_operations,
    run_for_sanitizer,
)
from tests.kernels.cuda.gpu_check.machine import Machine, Result, find_machine
from tests.kernels.cuda.gpu_check.speed import measure_attention, measure_steps


class Part(NamedTuple):
    """A part of the check, which runs in a process of its own."""

    run: Callable[[Machine, int], Iterator[Result]]  # with the number of results to skip
    seconds: float  # in which it is to end
    tool: Sequence[str] = ()  # a command under which it runs
    restarts: bool = False  # whether it goes on with the next mutant if it crashes


def _without_skip(run: Callable[[Machine], Iterator[Result]]) -> Callable[[Machine, int], Iterator[Result]]:
    return lambda machine, _: run(machine)


def _sanitizer(tool: str) -> Part:
    return Part(
        _without_skip(run_for_sanitizer),
        50,
        ("compute-sanitizer", f"--tool={tool}", "--print-limit=5", "--error-exitcode=3"),
    )


# In this order, as long as there is time.
PARTS: Mapping[str, Part] = {
    "bfloat16": Part(_without_skip(partial(check_operations, dtype=torch.bfloat16)), 90),
    "attention speed": Part(_without_skip(measure_attention), 60),
    "step speed": Part(_without_skip(measure_steps), 60),
    "float32": Part(_without_skip(partial(check_operations, dtype=torch.float32)), 90),
    "float16": Part(_without_skip(partial(check_operations, dtype=torch.float16)), 90),
    "attention": Part(_without_skip(check_attention), 60),
    "memcheck": _sanitizer("memcheck"),
    "racecheck": _sanitizer("racecheck"),
    "engine": Part(_without_skip(check_engine), 50),
    "mutants": Part(check_mutants, 120, restarts=True),
}


def run_part(name: str, device: str, skip: int) -> None:
    """Run a part in this process, and print its results; what it raises is the last one."""
    try:
        for result in PARTS[name].run(find_machine(device), skip):
            print(json.dumps(result), flush=True)
    except ImportError as error:
        print(json.dumps({"skipped": f"needs {error.name}"}), flush=True)
    except Exception as error:  # whatever it is, it is a result
        print(json.dumps({"fault": f"{type(error).__name__}: {error}"[:600]}), flush=True)


def start_part(name: str, device: str, seconds: float, emit: Callable[[Result], None]) -> None:
    """Run a part in a process of its own, and emit its results, then how it ended."""
    part, begin, skip = PARTS[name], time.monotonic(), 0
    if part.tool and shutil.which(part.tool[0]) is None:
        return emit({"skipped": f"there is no {part.tool[0]}"})
    while (left := min(part.seconds, seconds) - (time.monotonic() - begin)) > 0:
        skipped = skip
        options = f"--device={device}", f"--part={name}", f"--skip={skip}"
        command = [*part.tool, sys.executable, "-m", MODULE, *options]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            timer = Timer(left, os.killpg, (process.pid, signal.SIGKILL))  # a tool and what it runs
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                result = parse_line(line)
                skip = result.get("mutant", skip - 1) + 1 if part.restarts else 0
                emit(result)
            timer.cancel()
        if process.returncode == 0 or skip == skipped:  # it has ended, or would crash at the same place again
            break
    took = time.monotonic() - begin
    ended = "stopped, as its time was over" if took >= min(part.seconds, seconds) else f"exit {process.returncode}"
    fault = None if process.returncode == 0 or ended.startswith("stopped") else "it crashed, or its tool found a fault"
    emit({"ended": ended, "seconds": round(took, 1), "fault": fault})


def parse_line(line: str) -> Result:
    """Return a line of a part's output: a result, or words of a tool."""
    try:
        result = json.loads(line)
    except ValueError:
        result = None
    return result if isinstance(result, dict) else {"says": line.rstrip()}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 1 if one of them found a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=470, help="in which all ends (470)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--skip", type=int, help=argparse.SUPPRESS)  # in the process of a part
    given = parser.parse_args(arguments)
    if given.skip is not None:
        run_part(given.part[0], given.device, given.skip)
        return 0
    begin, faults = time.monotonic(), 0
    folder = os.environ.get("OUT")

    def emit(part: str, result: Result) -> None:
        nonlocal faults
        faults += result.get("fault") is not None
        line = json.dumps({"part": part, "at": round(time.monotonic() - begin, 1), **result})
        print(line, flush=True)
        if folder:
            with Path(folder, "gpu_check.jsonl").open("a") as file:
                print(line, file=file)

    emit("machine", describe_machine(given.device))
    for name in given.part or PARTS:
        left = given.seconds - (time.monotonic() - begin)
        if left > 5:
            start_part(name, given.device, left, partial(emit, name))
        else:
            emit(name, {"skipped": "no time is left"})
    emit("all", {"faults": faults})
    return 1 if faults else 0


def describe_machine(device: str) -> Result:
    """Return the versions, and the names of the GPU and of the commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "commit": commit.stdout.strip() or None}


if __name__ == "__main__":
    sys.exit(main())

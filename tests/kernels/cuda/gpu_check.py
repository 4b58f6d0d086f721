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
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.cuda import runtime
from kernels.cuda.graphs import GraphOps, capture_graph
from kernels.cuda.library import CudaLibrary
from kernels.metal import attention
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels
from kernels.ops import AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, KVLocation, Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, Step
from kernels.selfcheck.check import check_ops
from kernels.selfcheck.op_db import OPS
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots
from tests.kernels.backend_matrix import LAYOUTS, ROWS, SPECS, TOLERANCE
from tests.kernels.cuda import host_kernels
from tests.kernels.metal.mutants import MUTANTS
from tests.kernels.metal.mutation_testing import Mutant, find_difference, is_source_of
from tests.kernels.test_attention import expected

Result = dict[str, Any]
BLOCK_SIZE = 32
MODULE = "tests.kernels.cuda.gpu_check"
MUTANTS_MD = Path(__file__).parents[1] / "metal/mutants.md"


class Machine(NamedTuple):
    """Where the kernels run."""

    device: torch.device
    load: Callable[[], MetalOps]
    compile_shader: Callable[[str], CudaLibrary]
    small: bool  # whether only small sizes are tried

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, call: Callable[[], object], seconds: float = 1.0) -> float:
        """Return the seconds of a call: the median of ten batches of calls."""
        call()
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        calls = 1 if self.small else max(1, int(seconds / 10 / (time.perf_counter() - begin)))
        times = []
        for _ in range(1 if self.small else 10):
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            self.synchronize()
            times.append((time.perf_counter() - begin) / calls)
        return sorted(times)[len(times) // 2]


def find_machine(name: str) -> Machine:
    if name == "cuda":
        return Machine(torch.device("cuda"), runtime.load, runtime.compile_shader, small=False)
    return Machine(torch.device("cpu"), host_kernels.load_host_ops, host_kernels.compile_shader, small=True)


# -------------------------------------------------------------------- are the results right?
def check_operations(machine: Machine, dtype: torch.dtype) -> Iterator[Result]:
    """Yield the verdict of the self-check on each operation."""
    for verdict in check_ops(machine.load(), dtype, machine.device):
        yield {"op": verdict.op, "error": verdict.error, "fault": verdict.fault}


def check_attention(machine: Machine) -> Iterator[Result]:
    """Yield the largest error of attention for every layout of memory, kind of layer and dtype (tests/kernels)."""
    ops = machine.load()
    for layout in LAYOUTS[:2] if machine.small else LAYOUTS:
        for name, spec in [*SPECS.items()][:2] if machine.small else SPECS.items():
            on_device = spec
            if spec.sink_logits is not None:
                on_device = spec._replace(sink_logits=spec.sink_logits.to(machine.device))
            for dtype, tolerance in TOLERANCE.items():
                window = 40 if layout.ring else None
                case = AttentionCase(ops, layout, on_device, ROWS, dtype, machine.device)
                on_host = AttentionCase(ReferenceOps(), layout, spec, ROWS, dtype)  # draws the same numbers
                case.write()
                on_host.write()
                error = max(
                    float((out.cpu().double() - expected(on_host, i, window)).abs().max())
                    for i, (out, row) in enumerate(zip(case.attend(window=window), ROWS, strict=True))
                    if row.past >= 0
                )
                fault = None if error < tolerance else "differs from the definition"
                yield {"layer": name, "layout": layout.kind, "dtype": str(dtype), "error": error, "fault": fault}


def check_engine(machine: Machine) -> Iterator[Result]:
    """Yield whether an engine with these kernels generates the tokens that plain torch does, for every strategy."""
    from tests.engine.test_devices import EXACT, LOSSY, generate  # imports most of the server

    settings: Mapping[str, Any] = {"device": machine.device.type, "kernels": "metal"}
    if machine.device.type == "cpu":
        settings = {"device": "metal-emulated"}
    for instances in (EXACT, LOSSY):
        names = [*instances][:2] if machine.small else [*instances]
        found = generate(Path("tiny"), names, strategies=instances, **settings)
        want = generate(Path("tiny"), names, strategies=instances, device="cpu", kernels="reference")
        for name in names:
            yield {"strategy": name, "fault": None if found[name] == want[name] else "other tokens"}


def check_mutants(machine: Machine, skip: int) -> Iterator[Result]:
    """Yield what catches each mutant that shows in a result; those of all kernels and kinds come first."""
    mutants = list_mutants()[: 2 if machine.small else None]
    for number, mutant in enumerate(mutants[skip:], skip):
        yield {"mutant": number, "kernel": mutant.kernel, "begins": f"{mutant.kind}: {mutant.words}"}
        ops = MetalOps(Kernels(partial(_compile_mutant, machine, mutant)))
        try:
            caught = find_difference(ops, mutant.kernel, mutant.dtype, machine.device)
        except Exception as error:  # the GPU refuses all that follows, so another process goes on
            yield {"mutant": number, "caught": f"{type(error).__name__}: {error}"[:300], "fault": None}
            sys.exit(1)
        yield {"mutant": number, "caught": caught, "fault": None if caught else "nothing catches it"}


def _compile_mutant(machine: Machine, mutant: Mutant, source: str) -> CudaLibrary:
    return machine.compile_shader(mutant.applied(source) if is_source_of(mutant.kernel, source) else source)


def list_mutants() -> list[Mutant]:
    """Return the mutants that a wrong result shows without a checker, as mutants.md says; one of each kind first."""
    rows = MUTANTS_MD.read_text(encoding="utf-8").splitlines()[2:]
    caught = [row.rstrip(" |").rpartition(" | ")[2] for row in rows]
    shown = [each for each, by in zip(MUTANTS, caught, strict=True) if by.startswith("off by")]
    seen: dict[tuple[str, str], int] = {}
    ranks = []
    for mutant in shown:
        ranks.append(seen.setdefault((mutant.kernel, mutant.kind), 0))
        seen[mutant.kernel, mutant.kind] += 1
    return [mutant for _, mutant in sorted(zip(ranks, shown, strict=True), key=lambda pair: pair[0])]


def run_for_sanitizer(machine: Machine) -> Iterator[Result]:
    """Yield the verdicts on all operations with small samples in bfloat16, for a run under compute-sanitizer."""
    ops, reference = machine.load(), ReferenceOps()
    for op in OPS:
        if op.name in ("forward_layers", "sample") or op.variant == "blocks":
            continue
        for (what, ours), _ in zip(
            op.samples(ops, torch.bfloat16, machine.device),
            op.samples(reference, torch.bfloat16, machine.device),
            strict=True,
        ):
            machine.synchronize()
            yield {"op": op.full_name, "sample": what, "fault": None if ours is not None else "no result"}


# -------------------------------------------------------------------- how fast are they?
def make_location(
    machine: Machine, specs: Sequence[LayerSpec], rows: int, length: int, dtype: torch.dtype
) -> KVLocation:
    """Return where the keys of `rows` sequences of `length` tokens are, in blocks in random order."""
    page, width = compute_block_bytes(specs, BLOCK_SIZE, dtype), -(-length // BLOCK_SIZE)
    pages = Pages(rows * width, page, machine.device)
    pages.memory.random_(0, 60)  # as bfloat16, small numbers
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).int()

    def int32(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=machine.device)

    at = Slots(
        table=order.view(rows, width).to(machine.device),
        block_size=BLOCK_SIZE,
        table_row=int32(range(rows)),
        q_start=int32(range(rows + 1)),
        start=int32([length - 1] * rows),
        num_decode=rows,
        max_q=1,
        max_kv=length,
        num_tokens=rows,
    )
    return KVLocation(KVStore(pages, specs, BLOCK_SIZE, dtype), at, None)


def measure_copy(machine: Machine) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(1 << (20 if machine.small else 32), dtype=torch.uint8, device=machine.device)
    to = torch.empty_like(source)
    return 2 * len(source) / machine.measure(lambda: to.copy_(source))


def measure_attention(machine: Machine) -> Iterator[Result]:
    """Yield the bandwidth of decode attention as a share of a copy's; the aim is 0.6.

    For each number of query heads that a threadgroup may compute: more take more registers, fewer read keys again.
    """
    copy = measure_copy(machine)
    yield {"copy": copy}
    shapes = {
        "8B, groups of 4": LayerSpec(8, 32, 128, 128),
        "7B, groups of 7": LayerSpec(4, 28, 128, 128),
        "0.5B, groups of 7": LayerSpec(2, 14, 64, 64),
    }
    for name, spec in shapes.items():
        numbers_per_lane = spec.head_dim // attention.LANES
        for length, rows in ((300, 1),) if machine.small else ((4096, 32), (32768, 8), (32768, 1)):
            for kv_dtype in (torch.bfloat16, torch.int8):
                store, at, _ = make_location(machine, [spec], rows, length, kv_dtype)
                q = torch.randn(rows, spec.num_q_heads, spec.head_dim, device=machine.device).to(torch.bfloat16)
                out, used = torch.empty_like(q), rows * length * compute_block_bytes([spec], 1, kv_dtype)
                for heads in (2, 4, 8):
                    with patch.dict(attention.MAX_HEADS_PER_GROUP, {numbers_per_lane: heads}):
                        ops = machine.load()
                        seconds = machine.measure(partial(ops.attend, out, q, store, 0, at, spec))
                    shown = {"shape": name, "tokens": length, "rows": rows, "kv": str(kv_dtype), "heads": heads}
                    yield {**shown, "us": 1e6 * seconds, "share_of_copy": used / seconds / copy}


class ModelShape(NamedTuple):
    """The sizes of a model's layers."""

    layers: int
    width: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int


MODELS = {
    "0.5B": ModelShape(24, 896, 14, 2, 64, 4864),
    "7B": ModelShape(28, 3584, 28, 4, 128, 18944),
}
TINY = {"tiny": ModelShape(2, 64, 4, 2, 32, 96)}


def make_layers(machine: Machine, shape: ModelShape) -> Sequence[DecoderLayer]:
    """Return the layers of a model with random weights in bfloat16."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=machine.device) / 16

    ops, spec = ReferenceOps(), LayerSpec(shape.kv_heads, shape.q_heads, shape.head_dim, shape.head_dim)
    angles = torch.randn(4096, shape.head_dim // 2, device=machine.device)
    q_width, qkv_heads = shape.q_heads * shape.head_dim, shape.q_heads + 2 * shape.kv_heads
    layers = []
    for _ in range(shape.layers):
        weights = AttentionWeights(
            norm=draw(shape.width),
            qkv=draw(qkv_heads * shape.head_dim, shape.width),
            qkv_bias=draw(qkv_heads * shape.head_dim),
            qk_norm=None,
            tables=(angles.cos(), angles.sin()),
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            o=draw(shape.width, q_width),
            o_bias=None,
            post_norm=None,
            next_norm=draw(shape.width),
            eps=1e-6,
        )
        mlp = GatedMLP(draw(2 * shape.mlp_width, shape.width), None, draw(shape.width, shape.mlp_width), None, "silu")
        layers.append(DecoderLayer(spec, weights.pack(ops), mlp.pack(ops), None))
    return layers


def measure_steps(machine: Machine) -> Iterator[Result]:
    """Yield the time of a decode step of all layers, launched one by one and as a CUDA graph.

    Also yield the bandwidth of its weights as a share of a copy's; the aim for 7B at batch 1 is 0.75.
    """
    copy = measure_copy(machine)
    for name, shape in (TINY if machine.small else MODELS).items():
        layers = make_layers(machine, shape)
        weight_bytes = sum(weight.nbytes for layer in layers for weight in layer.tensors())
        specs, decoder = [layer.spec for layer in layers], DecoderLayers(layers)
        kinds: Mapping[str, Ops] = {
            "launches": MetalOps(Kernels(machine.compile_shader)),
            "graph": GraphOps(Kernels(machine.compile_shader), capture_graph if not machine.small else repeat),
            "plain torch": ReferenceOps(),
        }
        for rows in (1, 8):
            x = torch.randn(rows, shape.width, device=machine.device).to(torch.bfloat16)
            location = make_location(machine, specs, rows, 1024, torch.bfloat16)
            yield {"model": name, "rows": rows, "fault": compare_steps(kinds, decoder, x, location)}
            for kind, ops in kinds.items():
                step = Step(ops, specs, [(slice(0, rows), location)])
                seconds = machine.measure(partial(ops.forward_layers, decoder, x, step))
                shown = {"model": name, "rows": rows, "kind": kind, "ms": 1e3 * seconds}
                yield {**shown, "share_of_copy": weight_bytes / seconds / copy}


def compare_steps(kinds: Mapping[str, Ops], decoder: DecoderLayers, x: Tensor, location: KVLocation) -> str | None:
    """Return what is wrong if steps one after the other have other bits in a graph than launched one by one."""
    specs = [layer.spec for layer in decoder.layers]
    outs = {}
    for kind in ("launches", "graph"):
        at = location.at
        at.start.fill_(at.max_kv - 5)
        steps = []
        for number in range(4):
            step = Step(kinds[kind], specs, [(slice(0, len(x)), location)])
            steps.append(kinds[kind].forward_layers(decoder, x + number, step))
            at.start.add_(1)
        outs[kind] = torch.stack(steps)
    return None if torch.equal(*outs.values()) else "a graph gives other results than its launches one by one"


def repeat(call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Stand for a CUDA graph on a CPU: make the call again."""
    out = call().clone()

    def replay() -> None:
        out.copy_(call())

    return out, replay


# -------------------------------------------------------------------- parts
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
    except Exception as error:  # whatever it is, it is a result
        print(json.dumps({"fault": f"{type(error).__name__}: {error}"[:600]}), flush=True)


def start_part(name: str, device: str, seconds: float, emit: Callable[[Result], None]) -> None:
    """Run a part in a process of its own, and emit its results, then how it ended."""
    part, begin, skip = PARTS[name], time.monotonic(), 0
    if part.tool and shutil.which(part.tool[0]) is None:
        return emit({"skipped": f"there is no {part.tool[0]}"})
    while (left := min(part.seconds, seconds) - (time.monotonic() - begin)) > 0:
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
        if process.returncode == 0 or not part.restarts:
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

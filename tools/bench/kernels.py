"""Measures each operation against the bandwidth of the memory; `python -m tools.bench kernels --help`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F

from kernels.backends import REFERENCE, list_backends
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import OpInfo
from server.profiling.machine import measure_fastest, measure_read_bandwidth
from tools.bench import kernel_inputs
from tools.bench.kernel_inputs import (
    GIBIBYTE,
    LAYERS,
    QUANTIZED,
    Calls,
    Layout,
    Sequences,
    Stored,
    attend,
    make_random_values,
    pack_weights,
)
from tools.bench.runner import Case, Context, Effort, Group, Reading, Row, Table

CONTEXTS = {  # tokens of the sequence; for products and sampling, rows of x or of logits
    "attend": (128, 1024, 4096, 16384),
    "linear": (1, 8),
    "linear.quantized": (1, 8),
    "qkv_proj_rope": (1, 8),
    "o_proj_add_norm": (1, 8),
    "mlp": (1, 8),
    "sample": (1, 16),
    "repeat_kv_heads": (128, 4096),
    "repeat_kv_heads_step": (128, 4096),
    "select_blocks": (4096, 16384),
}
DEFAULT_CONTEXTS = (512,)
OP_NAMES = [op.full_name for op in OPS]
SDPA, GATHERED = "sdpa", "sdpa+gather"  # torch's own attention, over dense keys and over keys gathered from blocks


class AttentionInput(NamedTuple):
    """What a call of attend reads, besides its context and dtype."""

    queries: int = 1  # of each sequence
    batch: int = 1  # sequences
    layout: Layout = "paged"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", nargs="+", choices=OP_NAMES, default=OP_NAMES, help="which operations")
    names = (REFERENCE, *(backend.name for backend in list_backends("cpu")), SDPA, GATHERED)
    add("--backend", nargs="+", choices=names, default=names, help="which backends (default: all)")
    dtypes = ("float32", "bfloat16", "float16", *QUANTIZED)
    help_text = "int8, int4, int8/int4: stored keys and values, for attend alone"
    add("--dtype", nargs="+", choices=dtypes, default=dtypes[:2], help=help_text)
    add("--context", type=_positive_int, nargs="+", help="tokens, or rows")
    add("--queries", type=_positive_int, default=1, help="queries of attend, as a chunk of a prompt (default: 1)")
    add("--batch", type=_positive_int, default=1, help="sequences of a call of attend (default: 1)")
    add("--layout", choices=get_args(Layout), default="paged", help="of attend's keys and values (default: paged)")
    add("--threads", type=_positive_int, help="default: torch's choice")


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is not at least 1")
    return number


def list_cases(context: Context) -> Iterator[Case]:
    """Yield a case for each operation, dtype and context; its variants are the backends."""
    options = context.options
    quantized = [dtype for dtype in options.dtype if dtype in QUANTIZED]
    if quantized and options.op != ["attend"]:
        raise ValueError(f"--dtype {quantized[0]}: stored keys and values have this format; add --op attend")
    if options.threads:
        torch.set_num_threads(options.threads)
    memory, backends = make_random_values(GIBIBYTE // 4, torch.float32), _load_backends(options.backend, context)
    attention = AttentionInput(options.queries, options.batch, options.layout)
    for op in (op for op in OPS if op.full_name in options.op):
        for dtype in options.dtype:
            for size in options.context or CONTEXTS.get(op.full_name, DEFAULT_CONTEXTS):
                row = Row(f"{op.full_name}, {dtype}, {size:,}", "µs a call")
                sdpa = op.name == "attend" and attention == AttentionInput() and dtype not in QUANTIZED
                names = [*backends, *(name for name in (SDPA, GATHERED) if sdpa and name in options.backend)]
                stored = QUANTIZED.get(dtype) or getattr(torch, dtype)
                set_up = partial(_make_runs, op, stored, size, attention, backends)
                yield Case(row.what, Table("kernels"), partial(_measure, row, memory), names, set_up)


def _measure(row: Row, memory: torch.Tensor, runs: Mapping[str, Callable[[], Run]], backend: str) -> Iterator[Reading]:
    """Measure a pass over the data, and how long a plain read of as many bytes takes just before."""
    run = runs[backend]()
    limit = run.num_bytes / measure_read_bandwidth(memory)
    seconds = measure_fastest(run.run_once)
    yield Reading(row, 1e6 * seconds / run.calls, 1e6 * limit / run.calls)


class Run(NamedTuple):
    """A pass of one backend over the data of an operation."""

    run_once: Callable[[], object]
    calls: int  # of the operation
    num_bytes: int


def _load_backends(names: Sequence[str], context: Context) -> Mapping[str, Ops]:
    """Return the operations to measure, by backend; note those that this machine lacks."""
    backends: dict[str, Ops] = {REFERENCE: ReferenceOps()} if REFERENCE in names else {}
    for backend in (backend for backend in list_backends("cpu") if backend.name in names):
        if backend.missing is None:
            backends[backend.name] = backend.load()
        else:
            context.notes.append(f"{backend.name} is left out: {backend.missing}")
    return backends


@contextmanager
def _make_runs(
    op: OpInfo, stored: Stored, context: int, attention: AttentionInput, backends: Mapping[str, Ops]
) -> Iterator[Mapping[str, Callable[[], Run]]]:
    """Yield functions that prepare the run of each backend; `stored` is the dtype of all numbers if it is one."""
    if op.name == "attend":
        calls = attend(stored, context, *attention)
    else:
        assert isinstance(stored, torch.dtype)
        calls = kernel_inputs.make_calls(op, stored, context)
    size = sum(op.count_bytes(*call) for call in calls)

    def pack(ops: Ops) -> Run:
        packed = [pack_weights(ops, op.name, call) for call in calls]
        return Run(partial(_run_pass, getattr(ops, op.name), packed), len(calls), size)

    runs: dict[str, Callable[[], Run]] = {name: partial(pack, ops) for name, ops in backends.items()}
    if op.name == "attend" and isinstance(stored, torch.dtype):
        dtype = stored
        runs |= {SDPA: partial(_run_sdpa, dtype, context, size), GATHERED: partial(_run_gathered, dtype, context, size)}
    yield runs


def _run_pass(run: Callable[..., object], calls: Calls) -> None:
    for call in calls:
        run(*call)


def _run_sdpa(dtype: torch.dtype, context: int, size: int) -> Run:
    """Return torch's attention over as many keys, which are dense."""
    sequences, spec = Sequences(dtype, context), LAYERS[0]
    q = make_random_values(spec.num_q_heads * spec.head_dim, dtype).view(1, spec.num_q_heads, 1, spec.head_dim)
    shape = (spec.num_kv_heads, context, spec.head_dim)
    planes = make_random_values(2 * sequences.num_sequences * len(LAYERS) * torch.Size(shape).numel(), dtype).view(
        -1, 2, 1, *shape
    )

    def dense() -> None:
        for k, v in planes:
            F.scaled_dot_product_attention(q, k, v, scale=spec.scale, enable_gqa=True)

    return Run(dense, len(planes), size)


def _run_gathered(dtype: torch.dtype, context: int, size: int) -> Run:
    """Return torch's attention over keys that are gathered from their blocks first."""
    sequences, spec = Sequences(dtype, context), LAYERS[0]
    q = make_random_values(spec.num_q_heads * spec.head_dim, dtype).view(1, spec.num_q_heads, 1, spec.head_dim)

    def gathered() -> None:
        for at, layer in sequences.iter_slots():
            blocks = at.table[at.table_row[0]].long()
            k, v = (
                plane[blocks].transpose(0, 1).reshape(1, spec.num_kv_heads, -1, spec.head_dim)[:, :, :context]
                for plane in (sequences.store.k(layer), sequences.store.v(layer))
            )
            F.scaled_dot_product_attention(q, k, v, scale=spec.scale, enable_gqa=True)

    return Run(gathered, sequences.num_sequences * len(LAYERS), size)


GROUP = Group(
    """\
Measures each operation against the bandwidth of the memory. Each measurement goes over 1 GiB of data, so that nothing
is found in a cache. Beside it stands how long a plain read of as much takes, measured just before. Compare the shares
of that: absolute figures are those of one machine at one time. Only backends for the CPU are measured.""",
    list_cases,
    add_arguments,
    Effort(1),
)

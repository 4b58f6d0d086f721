"""`python -m tools.bench.kernels`: measures each operation against the bandwidth of the memory, one line per operation.

Each measurement goes over 1 GiB of data, so that nothing is found in a cache. The bandwidth is measured beside it, by a
plain read of as much. Compare the shares of that bandwidth: absolute figures are those of one machine at one time. Only
backends for the CPU are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F

from config.flags import parse_count_flag
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
    Calls,
    Layout,
    Sequences,
    attend,
    make_random_values,
    pack_weights,
)

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


class AttentionInput(NamedTuple):
    """What a call of attend reads, besides its context and dtype."""

    queries: int = 1  # of each sequence
    batch: int = 1  # sequences
    layout: Layout = "paged"


class Row(NamedTuple):
    op: str
    backend: str
    dtype: str
    context: int
    us_per_call: float
    gb_per_s: float
    read_gb_per_s: float  # of this machine, measured just before
    ratio: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.kernels", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=OP_NAMES, default=OP_NAMES, help="which operations")
    names = (REFERENCE, *(backend.name for backend in list_backends("cpu")), "sdpa", "sdpa+gather")
    parser.add_argument("--backend", nargs="+", choices=names, help="which backends (default: all)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=("float32", "bfloat16", "float16", "int8"),
        default=["float32", "bfloat16"],
        help="int8: stored keys and values, for attend alone",
    )
    parser.add_argument("--context", type=parse_count_flag, nargs="+", help="tokens, or rows")
    parser.add_argument(
        "--queries", type=parse_count_flag, default=1, help="queries of attend, as a chunk of a prompt (default: 1)"
    )
    parser.add_argument("--batch", type=parse_count_flag, default=1, help="sequences of a call of attend (default: 1)")
    parser.add_argument(
        "--layout", choices=get_args(Layout), default="paged", help="of attend's keys and values (default: paged)"
    )
    parser.add_argument("--threads", type=parse_count_flag, help="default: torch's choice")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args(arguments)
    if "int8" in options.dtype and options.op != ["attend"]:
        parser.error("--dtype int8: stored keys and values have this dtype; add --op attend")
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.json:
        print(
            f"{'op':20} {'backend':12} {'dtype':9} {'context':>7} {'µs/call':>9} {'GB/s':>7} {'memory':>7} {'share':>6}"
        )
    attention = AttentionInput(options.queries, options.batch, options.layout)
    for row in measure_ops(options.op, options.backend, options.dtype, options.context, attention):
        if options.json:
            print(json.dumps(row._asdict()), flush=True)
        else:
            print(
                f"{row.op:20} {row.backend:12} {row.dtype:9} {row.context:7,} "
                f"{row.us_per_call:9,.1f} {row.gb_per_s:7.2f} {row.read_gb_per_s:7.2f} {row.ratio:6.0%}",
                flush=True,
            )


def measure_ops(
    ops: Sequence[str],
    backend_names: Sequence[str] | None,
    dtypes: Sequence[str],
    contexts: Sequence[int] | None,
    attention: AttentionInput,
) -> Iterator[Row]:
    """Measure these operations; yield a row for each backend, dtype and context."""
    memory, backends = make_random_values(GIBIBYTE // 4, torch.float32), _load_backends(backend_names)
    for op in (op for op in OPS if op.full_name in ops):
        for dtype in dtypes:
            for context in contexts or CONTEXTS.get(op.full_name, DEFAULT_CONTEXTS):
                print(f"\r{op.full_name}, {dtype}, {context} ...\033[K\r", end="", file=sys.stderr, flush=True)
                sdpa = attention == AttentionInput() and dtype != "int8"
                sdpa = sdpa and (backend_names is None or "sdpa" in backend_names)
                for run in _make_runs(op, getattr(torch, dtype), context, attention, backends, sdpa=sdpa):
                    bandwidth = measure_read_bandwidth(memory)
                    seconds = measure_fastest(run.run_once)
                    speed = run.num_bytes / seconds
                    us_per_call = 1e6 * seconds / run.calls
                    yield Row(
                        op.full_name,
                        run.name,
                        dtype,
                        context,
                        us_per_call,
                        speed / 1e9,
                        bandwidth / 1e9,
                        speed / bandwidth,
                    )


class Run(NamedTuple):
    """A pass of one backend over the data of an operation."""

    name: str
    run_once: Callable[[], object]
    calls: int  # of the operation
    num_bytes: int


def _load_backends(backend_names: Sequence[str] | None) -> Mapping[str, Ops]:
    """Return the operations to measure, by backend; name on stderr those that this machine lacks."""
    backends: dict[str, Ops] = (
        {REFERENCE: ReferenceOps()} if backend_names is None or REFERENCE in backend_names else {}
    )
    for backend in list_backends("cpu"):
        if backend_names is not None and backend.name not in backend_names:
            continue
        if backend.missing is None:
            backends[backend.name] = backend.load()
        else:
            print(f"{backend.name} is left out: {backend.missing}", file=sys.stderr)
    return backends


def _make_runs(
    op: OpInfo, dtype: torch.dtype, context: int, attention: AttentionInput, backends: Mapping[str, Ops], *, sdpa: bool
) -> Iterator[Run]:
    calls = attend(dtype, context, *attention) if op.name == "attend" else kernel_inputs.make_calls(op, dtype, context)
    size = sum(op.count_bytes(*call) for call in calls)
    for name, ops in backends.items():
        packed = [pack_weights(ops, op.name, call) for call in calls]
        yield Run(name, partial(_run_pass, getattr(ops, op.name), packed), len(calls), size)
    if op.name == "attend" and sdpa:
        yield from _make_sdpa_runs(dtype, context, size)


def _run_pass(run: Callable[..., object], calls: Calls) -> None:
    for call in calls:
        run(*call)


def _make_sdpa_runs(dtype: torch.dtype, context: int, size: int) -> Iterator[Run]:
    """Yield torch's attention over as many keys: dense ones, and ones that are gathered from their blocks first."""
    sequences, spec = Sequences(dtype, context), LAYERS[0]
    q = make_random_values(spec.num_q_heads * spec.head_dim, dtype).view(1, spec.num_q_heads, 1, spec.head_dim)
    shape = (spec.num_kv_heads, context, spec.head_dim)
    planes = make_random_values(2 * sequences.num_sequences * len(LAYERS) * torch.Size(shape).numel(), dtype).view(
        -1, 2, 1, *shape
    )

    def dense() -> None:
        for k, v in planes:
            F.scaled_dot_product_attention(q, k, v, scale=spec.scale, enable_gqa=True)

    def gathered() -> None:
        for at, layer in sequences.iter_slots():
            blocks = at.table[at.table_row[0]].long()
            k, v = (
                plane[blocks].transpose(0, 1).reshape(1, spec.num_kv_heads, -1, spec.head_dim)[:, :, :context]
                for plane in (sequences.store.k(layer), sequences.store.v(layer))
            )
            F.scaled_dot_product_attention(q, k, v, scale=spec.scale, enable_gqa=True)

    yield Run("sdpa", dense, len(planes), size)
    yield Run("sdpa+gather", gathered, len(planes), size)


if __name__ == "__main__":
    main()

"""Checks of the kernels' results: operations, attention, an engine, mutants."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.cuda.library import CudaLibrary
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase
from kernels.selfcheck.check import check_ops
from kernels.selfcheck.op_db import OPS
from tests.kernels.backend_matrix import LAYOUTS, ROWS, SPECS, TOLERANCE
from tests.kernels.cuda.gpu_check.machine import Machine, Result
from tests.kernels.metal.mutants import MUTANTS
from tests.kernels.metal.mutation_testing import Mutant, find_difference, is_source_of
from tests.kernels.test_attention import expected

MUTANTS_MD = Path(__file__).parents[2] / "metal/mutants.md"


def check_operations(machine: Machine, dtype: torch.dtype) -> Iterator[Result]:
    """Yield the verdict of the self-check on each operation."""
    for verdict in check_ops(machine.make_ops(), dtype, machine.device):
        yield {"op": verdict.op, "error": verdict.error, "fault": verdict.fault}


def check_attention(machine: Machine) -> Iterator[Result]:
    """Yield the largest error of attention for every layout of memory, kind of layer and dtype (tests/kernels)."""
    ops = machine.make_ops()
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
    """Run all operations with small samples in bfloat16, for compute-sanitizer, which says what is wrong.

    Products come last: most of their launches are torch's.
    """
    for op in sorted(OPS, key=lambda op: op.name == "linear"):
        if op.name not in ("forward_layers", "sample"):
            for _ in op.samples(machine.make_ops(), torch.bfloat16, machine.device):
                machine.synchronize()
            yield {"op": op.full_name, "fault": None}

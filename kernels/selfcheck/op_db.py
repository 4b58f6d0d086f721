"""The table of all operations (like PyTorch's op_db).

The self-check, the tests, the metrics and docs/internals/kernels.md iterate over OPS, so a new row adds an operation to
all of them. ops.py says what each operation computes.

`python -m kernels.selfcheck.op_db` prints the table of docs/internals/kernels.md.
"""

from __future__ import annotations

from inspect import signature

from kernels.ops import DTYPES, Ops
from kernels.selfcheck.cache_ops import CACHE_OPS
from kernels.selfcheck.layer_ops import FORWARD_LAYERS, LAYER_OPS
from kernels.selfcheck.op_info import OpInfo

OPS: tuple[OpInfo, ...] = (
    *LAYER_OPS,
    *CACHE_OPS,
    FORWARD_LAYERS,
)  # forward_layers, composed of the others, comes last; several rows may describe one operation


# -------------------------------------------------------------------- docs/internals/kernels.md
def markdown() -> str:
    """Return the table of docs/internals/kernels.md, made from the docstrings of Ops and the rows of OPS."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    head = f"| operation | what it does | must move | off by at most ({dtypes}) |"
    return "\n".join([head, "|---|---|---|---|", *map(_markdown_row, OPS)])


def _markdown_row(op: OpInfo) -> str:
    method = getattr(Ops, op.name)
    assert method.__doc__, f"Ops.{op.name} has no docstring: docs/internals/kernels.md needs its first line"
    call = f"`{op.name}({', '.join([*signature(method).parameters][1:])})`" + (op.variant and f", {op.variant}")
    exact = not any(op.tolerance.values())
    tolerance = "exact" if exact else ", ".join(f"{op.tolerance[dtype]:g}" for dtype in DTYPES)
    return f"| {call} | {method.__doc__.splitlines()[0]} | {op.traffic} | {tolerance} |"


if __name__ == "__main__":
    print(markdown())

"""Every operation of every backend refuses arguments that do not fit, without ending the process."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.types import LayerSpec
from kernels.weights.quantization import QuantizedTensor
from kernels.weights.stored import ConcatenatedWeight
from tests.kernels.backend_matrix import BACKENDS, NAMES

backends = pytest.mark.parametrize("backend", NAMES)
MINUTES = 10


@backends
def test_wrong_arguments_are_a_value_error_or_make_no_difference(backend: str) -> None:
    """Makes thousands of calls in another process; if that ends, the last call that it named is the cause."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    program = [sys.executable, "-m", "tests.kernels.wrong_arguments", backend, str(seed)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60 * MINUTES, check=False)
    last = done.stdout.splitlines()[-1:] or ["nothing"]
    assert "FAULTS: " in done.stdout, f"ended with {done.returncode} in: {last[0]}\n{done.stderr[-2000:]}"
    faults = done.stdout.partition("FAULTS: ")[2]
    assert done.returncode == 0, faults[:5000]


@backends
@pytest.mark.parametrize("position", [-1, 8, 1 << 40])
def test_positions_without_a_row_in_the_tables_are_refused(backend: str, position: int) -> None:
    """On CPUs. On a GPU positions are not checked, as a step would have to wait for them."""
    ops, table = BACKENDS[backend](), torch.ones(8, 4)
    if backend.startswith("metal"):
        pytest.skip("Metal's kernels do not look at positions")
    with pytest.raises(ValueError, match="positions must be from 0 to 7"):
        ops.rope(torch.ones(2, 3, 8), table, table, torch.tensor([0, position]))


def test_what_a_message_says() -> None:
    words = r"^add_rms_norm: delta must be bfloat16 \[2, 16\] on cpu, and is float32 \[2, 12\] on cpu$"
    x, delta = torch.ones(2, 16).bfloat16(), torch.ones(2, 12)
    with pytest.raises(ValueError, match=words):
        ReferenceOps().add_rms_norm(x, delta, torch.ones(16), 1e-6)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith("cpu-")])
def test_what_a_message_of_the_compiled_kernels_says(backend: str) -> None:
    words = (
        r"^add_rms_norm: delta must be bfloat16 \[2, 16\] in the CPU's memory, dense in its last dimension, "
        r"and is float32 \[2, 12\] with strides \[12, 1\] on cpu"
    )
    x, delta = torch.ones(2, 16).bfloat16(), torch.ones(2, 12)
    with pytest.raises(ValueError, match=words):
        BACKENDS[backend]().add_rms_norm(x, delta, torch.ones(16), 1e-6)


def test_parts_of_a_quantized_weight_that_do_not_fit_are_refused() -> None:
    numbers, scale = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    QuantizedTensor(numbers, scale, scale, 8, 32)
    for wrong in (
        (numbers, scale[:, :1], scale, 8, 32),
        (numbers, scale, scale, 8, 0),
        (numbers, scale, scale, 4, 32),
        (numbers, scale, scale, 3, 32),
        (numbers[:0], scale[:0], scale[:0], 8, 32),
        (numbers.float(), scale, scale, 8, 32),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            QuantizedTensor(*wrong)


def test_matrices_of_several_widths_are_not_joined() -> None:
    with pytest.raises(ValueError, match="of one width"):
        ConcatenatedWeight([torch.ones(2, 3), torch.ones(2, 4)])


@backends
def test_addresses_that_were_changed_in_place_are_checked_again(backend: str) -> None:
    """A strategy may keep its `Slots` from step to step: `check_slots` looks at them anew."""
    ops = BACKENDS[backend]()
    case = AttentionCase(ops, Layout(16), LayerSpec(2, 4, 8, 8), [CaseRow(40, 1)], torch.float32)
    case.write()
    before = case.attend()
    ops.check_slots(case.store, 0, case.at, 1)
    case.at.table[0, 1] = case.store.num_blocks
    with pytest.raises(ValueError, match=r"^check_slots: the table"):
        ops.check_slots(case.store, 0, case.at, 1)
    with pytest.raises(ValueError, match=r"^attend: the table"):
        case.attend()
    case.at.table.copy_(case.table.flip(0))
    ops.check_slots(case.store, 0, case.at, 1)
    assert all(map(torch.equal, case.attend(), before))


@pytest.mark.parametrize(
    "lse",
    [
        torch.ones(1, 4, dtype=torch.float64),
        torch.ones(1, 4, dtype=torch.bfloat16),
        torch.ones(2, 4),
        torch.ones(1, 3),
        torch.ones(4),
        torch.ones(1, 4, 1),
        torch.ones(1, 4, device="meta"),
    ],
    ids=lambda lse: f"{lse.dtype} {[*lse.shape]} on {lse.device}",
)
@backends
def test_logarithms_of_sums_are_written_only_where_they_fit(backend: str, lse: Tensor) -> None:
    case = AttentionCase(BACKENDS[backend](), Layout(16), LayerSpec(2, 4, 8, 8), [CaseRow(40, 1)], torch.float32)
    case.write()
    with pytest.raises(ValueError, match=r"^attend: lse must be float32 \[1, 4\]"):
        case.attend(lse=lse)


@backends
def test_nothing_is_gathered_from_a_row_of_padding(backend: str) -> None:
    """Its table row is not checked, as no key of it is read or written."""
    rows = [CaseRow(20, 1), CaseRow(-1, 4)]
    case = AttentionCase(BACKENDS[backend](), Layout(16), LayerSpec(2, 4, 8, 8), rows, torch.float32)
    case.at.table_row[1] = 1 << 20
    with pytest.raises(ValueError, match="gather: "):
        case.ops.gather(case.store, 0, case.at, 1, torch.tensor([0]))

"""Every operation of every backend refuses arguments that do not fit, without ending the process."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from kernels.memory import ConcatenatedWeight
from kernels.quantization import QuantizedTensor
from kernels.reference.backend import ReferenceOps
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

"""Our folder `kernels` and transformers live in one environment, and how pytest was started changes no test."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


def test_transformers_imports_beside_our_kernels() -> None:
    """It takes any `kernels` for Hugging Face's and looks at its version; see docs/internals/why.md."""
    code = "import kernels.types; from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"
    result = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "LlamaForCausalLM", result.stderr


def test_the_version_is_outside_the_range_that_transformers_stumbles_over() -> None:
    assert metadata.version("kvmux") >= "1.0.0"


def test_started_programs_act_on_signals() -> None:
    code = "import signal; print([n.name for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN])"
    ignored = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not [number for number in ENDING if number.name in ignored]


def test_started_programs_act_on_signals_that_pytest_ignores() -> None:
    """As under nohup, and in the background of a script."""
    shell = ["sh", "-c", 'trap "" HUP INT TERM; exec "$@"', "sh"]
    test = f"{__file__}::{test_started_programs_act_on_signals.__name__}"
    done = subprocess.run([*shell, sys.executable, "-m", "pytest", test], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_mark_within_a_file_selects_its_tests() -> None:
    """Though files are left out unread whose folder has not the mark."""
    file = "tests/fuzzing/counted_tests.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow and apart", file]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert file in done.stdout, done.stdout

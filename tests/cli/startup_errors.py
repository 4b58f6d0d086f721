"""Run `kvmux serve` in this process and read the error that it prints at start."""

from __future__ import annotations

import pytest

from server.cli import main as cli

# of an engine that is built quickly
SMALL_ENGINE = {"kernels": "reference", "kv_memory": "8MiB", "max_num_seqs": 2, "dtype": "float32", "threads": 1}


def startup_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error that `kvmux serve` prints at start: one line, or nothing if it starts."""
    try:
        code = cli.main(["serve", *arguments])
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    told = capsys.readouterr().err
    lines = told.splitlines()
    assert (code, len(lines)) in ((0, 0), (2, 1)), (arguments, code, told[:2000])
    assert "Traceback" not in told
    assert len(told) < 3000, "a value is not repeated whole"
    return told

"""After an interrupted `make bench` no server and no client is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.server_process import PATIENCE, eventually
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench import models
from tools.bench.__main__ import INTERRUPTED
from tools.bench.models import LLAMA, make_model


@pytest.fixture
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model under the name of one of the models of `make bench`."""
    monkeypatch.setattr(models, "LEARNT_VOCAB_SIZE", 600)
    monkeypatch.setattr(models, "MAX_TRAINING_FILES", 5)
    make_model(replace(SMALL_SHAPE, name=LLAMA.name, max_positions=LLAMA.max_positions), tmp_path, lambda _: None)
    return tmp_path


def runs(process: psutil.Process, command: str) -> bool:
    try:
        return f"-m server {command}" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


@pytest.mark.apart
def test_a_signal_ends_all_that_was_started(models_folder: Path) -> None:
    """While the server starts."""
    command = [sys.executable, "-m", "tools.bench", "--rows", "decode", "--model", LLAMA.name]
    with subprocess.Popen([*command, "--models", str(models_folder)], stderr=subprocess.DEVNULL) as bench:
        family = []
        try:
            children = partial(psutil.Process(bench.pid).children, recursive=True)
            eventually(lambda: any(runs(child, "serve") for child in children()))
            family = children()
            bench.send_signal(signal.SIGTERM)
            assert bench.wait(PATIENCE) == INTERRUPTED
            assert not psutil.wait_procs(family, timeout=PATIENCE)[1]
        finally:
            for process in (*family, bench):
                with suppress(psutil.Error):
                    process.kill()

"""The router in Ray's own loop, and calls through it: of replicas that have gone, hang, or cancel what they do."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster.ray_cluster import ROOT, get_python, make_environment
from tests.end_to_end.server_process import PATIENCE

pytestmark = pytest.mark.ray


def test_calls_of_replicas_that_have_gone_or_hang_end_and_keep_no_others() -> None:
    command = [get_python(), "-m", "tests.cluster.routed_echo"]
    result = subprocess.run(
        command, cwd=ROOT, env=make_environment(), capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert result.returncode == 0, result.stderr
    assert "the router goes on" in result.stdout
    assert "calls end" in result.stdout

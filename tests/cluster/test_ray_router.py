"""The router in Ray's own loop: a request for a replica that has gone ends, and keeps no others from being routed."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster.ray_cluster import ROOT, get_python, make_environment
from tests.end_to_end.server_process import PATIENCE

pytestmark = pytest.mark.ray


def test_a_request_for_a_replica_that_has_gone_is_refused() -> None:
    command = [get_python(), "-m", "tests.cluster.routed_echo"]
    result = subprocess.run(
        command, cwd=ROOT, env=make_environment(), capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert result.returncode == 0, result.stderr
    assert "the router goes on" in result.stdout

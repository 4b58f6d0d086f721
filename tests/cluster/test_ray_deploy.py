"""A Ray cluster that is there already: the Serve config file, and replicas that come and go with the load."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.cluster.ray_cluster import ROOT, Cluster, find_free_port, get_python, make_environment, running
from tests.end_to_end.server_process import PATIENCE, eventually

pytestmark = pytest.mark.ray


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    """Run the head of a Ray cluster; return the address of its dashboard, which `serve deploy` calls."""
    port, environment = find_free_port(), make_environment()
    folder = os.path.dirname(get_python())
    command = [f"{folder}/ray", "start", "--head", "--block", "--port", str(find_free_port()), "--num-cpus", "2"]
    command += ["--dashboard-port", str(port), "--include-dashboard", "true", "--disable-usage-stats"]
    with (tmp_path / "head.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            eventually(lambda: httpx.get(f"{address}/api/version").status_code == 200)
            yield address
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_a_serve_config_file_is_deployed_and_updated(dashboard: str, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "config" / "ray" / "serve.yaml").read_text())
    config["http_options"]["port"] = port = find_free_port()
    arguments = config["applications"][0]["args"]
    arguments |= {"replicas": 1, "kv_memory": "16MiB", "threads": 1}

    def deploy() -> None:
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        serve = os.path.join(os.path.dirname(get_python()), "serve")
        command = [serve, "deploy", str(file), "--address", dashboard]
        subprocess.run(command, cwd=ROOT, env=make_environment(), check=True, timeout=PATIENCE)

    def is_serving(max_num_seqs: int) -> bool:
        response = httpx.get(f"http://127.0.0.1:{port}/v1/settings", timeout=PATIENCE)
        return response.status_code == 200 and bool(response.json()["max_num_seqs"] == max_num_seqs)

    deploy()
    eventually(lambda: is_serving(64))
    body = {"prompt": "Once upon a time", "max_tokens": 4}
    assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
    arguments["max_num_seqs"] = 8
    deploy()
    eventually(lambda: is_serving(8))


def test_replicas_are_added_while_prompts_wait() -> None:
    flags = ("--replicas", "1", "--max-replicas", "2", "--kv-memory", "16MiB", "--max-num-seqs", "2")
    with running(*flags) as cluster:
        cluster.wait_for_replicas(1)
        stop, statuses = threading.Event(), Counter[int]()
        clients = [threading.Thread(target=send_load, args=(cluster, stop, statuses)) for _ in range(16)]
        for each in clients:
            each.start()
        try:
            eventually(lambda: len(cluster.list_replicas()) == 2)
            eventually(
                lambda: all(cluster.metric("kvmux_requests_total", replica=id) for id in cluster.list_replicas())
            )
        finally:
            stop.set()
            for each in clients:
                each.join()
        assert statuses.keys() == {200}, statuses


def send_load(cluster: Cluster, stop: threading.Event, statuses: Counter[int]) -> None:
    """Send long prompts, one after the other, until the event is set."""
    while not stop.is_set():
        words = " ".join(f"{random.getrandbits(20):x}" for _ in range(180))
        body = {"prompt": words, "max_tokens": 100, "ignore_eos": True}
        statuses[httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE).status_code] += 1

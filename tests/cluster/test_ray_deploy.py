"""A Ray cluster that is there already: the Serve config file, and replicas that come and go with the load."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def make_config() -> tuple[dict[str, Any], str]:
    """Return the Serve config file of this repository, for small replicas and a free port, and the URL of its proxy."""
    config = yaml.safe_load((ROOT / "config" / "ray" / "serve.yaml").read_text())
    config["http_options"]["port"] = port = find_free_port()
    config["applications"][0]["args"] |= {"replicas": 1, "kv_memory": "16MiB", "threads": 1}
    return config, f"http://127.0.0.1:{port}"


def deploy(config: dict[str, Any], dashboard: str, folder: Path) -> None:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    serve = os.path.join(os.path.dirname(get_python()), "serve")
    command = [serve, "deploy", str(file), "--address", dashboard]
    subprocess.run(command, cwd=ROOT, env=make_environment(), check=True, timeout=PATIENCE)


def test_a_serve_config_file_is_deployed_and_updated(dashboard: str, tmp_path: Path) -> None:
    config, url = make_config()

    def is_serving(max_num_seqs: int) -> bool:
        response = httpx.get(f"{url}/v1/settings", timeout=PATIENCE)
        return response.status_code == 200 and bool(response.json()["max_num_seqs"] == max_num_seqs)

    deploy(config, dashboard, tmp_path)
    eventually(lambda: is_serving(64))
    body = {"prompt": "Once upon a time", "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
    config["applications"][0]["args"]["max_num_seqs"] = 8
    deploy(config, dashboard, tmp_path)
    eventually(lambda: is_serving(8))


def test_two_applications_have_keys_of_their_own(dashboard: str, tmp_path: Path) -> None:
    """Each has a path of its own, below which every key and token is asked for."""
    config, url = make_config()
    (one,) = config["applications"]
    config["applications"] = []
    for name in ("one", "two"):
        keys = {"api_keys": [f"{name}-key"], "admin_token": f"{name}-token", "metrics_key": f"{name}-metrics"}
        arguments = {**one["args"], **keys}
        config["applications"].append({**one, "name": name, "route_prefix": f"/{name}", "args": arguments})
    deploy(config, dashboard, tmp_path)
    body = {"prompt": "Once upon a time", "max_tokens": 4}

    def send(path: str, key: str, method: str = "GET") -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        json = body if path.endswith("completions") else None
        return httpx.request(method, url + path, json=json, headers=headers, timeout=PATIENCE).status_code

    for name, other in (("one", "two"), ("two", "one")):
        eventually(lambda name=name: send(f"/{name}/ready", "") == 200)
        requests = {
            ("POST", "/v1/completions"): "key",
            ("POST", "/completions"): "key",
            ("GET", "/v1/models"): "key",
            ("GET", "/v1/replicas"): "key",
            ("GET", "/v1/live"): "token",
            ("POST", "/v1/kv_cache/paged/clear"): "token",
            ("GET", "/metrics"): "metrics",
        }
        (replica,) = httpx.get(
            f"{url}/{name}/v1/replicas", headers={"authorization": f"Bearer {name}-key"}, timeout=PATIENCE
        ).json()["data"]
        for (method, path), kind in requests.items():
            for base in ("", f"/replicas/{replica['id']}"):
                if path == "/v1/replicas" and base:
                    continue
                found = {
                    key: send(f"/{name}{base}{path}", key, method) for key in (f"{name}-{kind}", f"{other}-{kind}", "")
                }
                assert found == {f"{name}-{kind}": 200, f"{other}-{kind}": 401, "": 401}, (name, base, path)
        assert send(f"/{name}/ui/", "") == 200
        assert send(f"/{name}/unknown", "") == 404


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

"""The files for Kubernetes are valid by its schemas and KubeRay's; they and the Serve config file suit the code."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from config.settings import Settings
from server.cluster.scale import Scale
from server.cluster.serve import engine_host
from server.processes.child import DEFAULT_TIMING

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "config" / "kubernetes"
VERSIONS = ["1.30", "1.37"]  # of Kubernetes
# Of KubeRay 1.5, the oldest version that the documents name, and 1.7
KUBERAY_SCHEMAS = sorted((Path(__file__).parent / "kuberay").glob("*.json"))
POD_DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((KUBERNETES / "pod.yaml").read_text()))
RAY_SERVICE: dict[str, Any] = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text())
SERVE_CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "config" / "ray" / "serve.yaml").read_text())
SERVE_CONFIG_V2: dict[str, Any] = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])


def make_strict_validator(file: Path) -> jsonschema.Draft202012Validator:
    """Return a validator by KubeRay's schema that allows no unknown fields, as `kubectl apply` does."""

    def forbid_unknown(schema: Any) -> Any:
        if isinstance(schema, list):
            return [forbid_unknown(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        strict = {name: forbid_unknown(each) for name, each in schema.items()}
        if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
            strict.setdefault("additionalProperties", False)
        return strict

    schema = json.loads(file.read_text())
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft202012Validator(forbid_unknown(schema))


def list_pod_specs() -> list[dict[str, Any]]:
    """Return the specifications of the RayService's pods: the head, and the workers."""
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    return [each["template"]["spec"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def get_serve_arguments() -> dict[str, Any]:
    """Return the arguments of the application in the RayService."""
    (application,) = SERVE_CONFIG_V2["applications"]
    return dict(application["args"])


def get_server_container() -> dict[str, Any]:
    """Return the container of the Deployment."""
    (container,) = POD_DOCUMENTS[0]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def get_flag(container: dict[str, Any], name: str) -> str:
    arguments: list[str] = container["args"]
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pod_and_its_service_are_valid(version: str) -> None:
    assert [each["kind"] for each in POD_DOCUMENTS] == ["Deployment", "Service"]
    for document in POD_DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("file", KUBERAY_SCHEMAS, ids=lambda file: file.stem)
def test_a_rayservice_is_valid(file: Path) -> None:
    validator = make_strict_validator(file)
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(RAY_SERVICE)] == []
    for path, wrong in [("spec.rayClusterConfig.headGroupSpec", "rayStartParam"), ("spec", "serveConfig")]:
        document = copy.deepcopy(RAY_SERVICE)
        part = document
        for name in path.split("."):
            part = part[name]
        part[wrong] = "1"
        assert not validator.is_valid(document), "the schema refuses unknown fields"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_a_rayservice_are_valid(version: str) -> None:
    for spec in list_pod_specs():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)


def test_unknown_fields_of_a_manifest_are_refused() -> None:
    wrong = {**POD_DOCUMENTS[0], "spec": {**POD_DOCUMENTS[0]["spec"], "replicaz": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_probes_call_ready_and_health_on_the_servers_port() -> None:
    container = get_server_container()
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    (port,) = container["ports"]
    assert port["containerPort"] == Settings.model_fields["port"].default


def test_pods_live_until_their_streams_have_ended() -> None:
    drain = float(get_flag(get_server_container(), "--drain-seconds"))
    needed = drain + DEFAULT_TIMING.worker_margin + DEFAULT_TIMING.engine_grace
    assert POD_DOCUMENTS[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= needed
    drain = get_serve_arguments()["drain_seconds"]
    _, worker = list_pod_specs()
    assert worker["terminationGracePeriodSeconds"] >= drain + engine_host.STOP_TIMEOUT
    variables = {each["name"]: each.get("value") for each in worker["containers"][0]["env"]}
    drain_of_ray = float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert drain < drain_of_ray < worker["terminationGracePeriodSeconds"]
    assert RAY_SERVICE["spec"]["rayClusterDeletionDelaySeconds"] > drain


def test_an_engine_has_as_many_threads_as_its_pod_requests_cpus() -> None:
    server, (worker,) = get_server_container(), list_pod_specs()[1]["containers"]
    assert server["resources"]["requests"]["cpu"] == get_flag(server, "--threads")
    arguments = get_serve_arguments()
    assert int(worker["resources"]["requests"]["cpu"]) == arguments["cpus"] == arguments["threads"]


def test_all_pods_get_the_secrets() -> None:
    """Ray reads the settings on the head, whose pod has no replica: without the key there, every request is served."""
    secrets = {"KVMUX_API_KEYS": "api-keys", "KVMUX_ADMIN_TOKEN": "admin-token"}
    containers = [get_server_container(), *(each for spec in list_pod_specs() for each in spec["containers"])]
    assert len(containers) == 3
    for container in containers:
        references = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
        assert {name: each["secretKeyRef"]["key"] for name, each in references.items()} == secrets


@pytest.mark.parametrize("config", [SERVE_CONFIG, SERVE_CONFIG_V2], ids=["serve.yaml", "rayservice.yaml"])
def test_applications_have_arguments_that_exist(config: dict[str, Any]) -> None:
    (application,) = config["applications"]
    assert application["import_path"] == "server.cluster.serve.deployment:application"
    known = {each.name for each in fields(Scale)} | Settings.model_fields.keys() | {"config"}
    assert application["args"].keys() <= known
    Settings(**{name: value for name, value in application["args"].items() if name in Settings.model_fields})


def test_the_version_of_ray_is_the_one_that_is_tested() -> None:
    (pin,) = (ROOT / "tests" / "cluster" / "requirements.txt").read_text().split()
    assert pin == f"ray[serve]=={RAY_SERVICE['spec']['rayClusterConfig']['rayVersion']}"

"""The files for Kubernetes and for `serve deploy`: valid by Kubernetes' and KubeRay's schemas, and fit for the code."""

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
KUBERAY_SCHEMAS = sorted(
    (Path(__file__).parent / "kuberay").glob("*.json")
)  # 1.5, the oldest that the documents name, and 1.7
POD_DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((KUBERNETES / "pod.yaml").read_text()))
RAY_SERVICE: dict[str, Any] = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text())
SERVE_CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "config" / "ray" / "serve.yaml").read_text())


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


def list_templates() -> list[dict[str, Any]]:
    """Return the templates of pods in the RayService."""
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    return [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


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
        assert not validator.is_valid(document), "the schema finds fields that there are not"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_a_rayservice_are_valid(version: str) -> None:
    for template in list_templates():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_an_error_in_a_manifest_is_found() -> None:
    wrong = {**POD_DOCUMENTS[0], "spec": {**POD_DOCUMENTS[0]["spec"], "replicaz": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_a_pod_is_asked_by_the_routes_that_there_are() -> None:
    (container,) = POD_DOCUMENTS[0]["spec"]["template"]["spec"]["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    (port,) = container["ports"]
    assert port["containerPort"] == Settings.model_fields["port"].default


def test_pods_live_until_their_streams_have_ended() -> None:
    (container,) = POD_DOCUMENTS[0]["spec"]["template"]["spec"]["containers"]
    drain = float(container["args"][container["args"].index("--drain-seconds") + 1])
    needed = drain + DEFAULT_TIMING.worker_margin + DEFAULT_TIMING.engine_grace
    assert POD_DOCUMENTS[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= needed
    (application,) = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])["applications"]
    worker = list_templates()[1]["spec"]
    assert worker["terminationGracePeriodSeconds"] >= application["args"]["drain_seconds"] + engine_host.STOP_TIMEOUT


@pytest.mark.parametrize("config", [SERVE_CONFIG, yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])])
def test_applications_get_arguments_that_they_know(config: dict[str, Any]) -> None:
    (application,) = config["applications"]
    assert application["import_path"] == "server.cluster.serve.deployment:application"
    known = {each.name for each in fields(Scale)} | Settings.model_fields.keys() | {"config"}
    assert application["args"].keys() <= known
    Settings(**{name: value for name, value in application["args"].items() if name in Settings.model_fields})


def test_rays_version_is_the_one_that_is_tested() -> None:
    (pin,) = (ROOT / "tests" / "cluster" / "requirements.txt").read_text().split()
    assert pin == f"ray[serve]=={RAY_SERVICE['spec']['rayClusterConfig']['rayVersion']}"

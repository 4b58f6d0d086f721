"""compose.yaml and the files that it mounts agree: paths, addresses, and scrape intervals."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.metrics.prometheus_server import CONFIG, ROOT
from tools.dashboards.catalogue import FOLDER

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
PROVISIONING = ROOT / "config" / "grafana" / "provisioning"
PROMETHEUS: dict[str, Any] = yaml.safe_load((CONFIG / "prometheus.yml").read_text())


def mounts(service: str) -> dict[str, str]:
    """Return the mounted files, by path in the container, with variables at their defaults."""
    given = SERVICES[service].get("volumes", [])
    volumes = (re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":") for volume in given)
    return {inside: outside for outside, inside, *_ in volumes}


def test_what_is_mounted_exists() -> None:
    for service in SERVICES:
        for outside in mounts(service).values():
            if not outside.startswith("."):
                assert outside in COMPOSE["volumes"]
            elif outside != "./models":  # the user's own
                assert (ROOT / outside).exists(), outside


def test_nothing_is_open_to_others() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_images_of_others_have_a_version() -> None:
    assert all(re.search(r":v?\d", service["image"]) for service in SERVICES.values() if "build" not in service)


def test_prometheus_finds_its_configuration_and_the_server() -> None:
    (named,) = (word for word in SERVICES["prometheus"]["command"] if word.startswith("--config.file="))
    folder, _, file = named.partition("=")[2].rpartition("/")
    assert ROOT / mounts("prometheus")[folder] / file == CONFIG / "prometheus.yml"
    assert {file.name for file in CONFIG.glob("*.yml")} == {"prometheus.yml", *PROMETHEUS["rule_files"]}
    (job,) = PROMETHEUS["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert_service(target)


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert_service(urlsplit(source["url"]).netloc)
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "kvmux.yaml").read_text())["providers"]
    seen = mounts("grafana")
    assert ROOT / seen[provider["options"]["path"]] == FOLDER
    assert ROOT / seen["/etc/grafana/provisioning"] == PROVISIONING
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder, _, file = home.rpartition("/")
    assert (ROOT / seen[folder] / file).exists()


def assert_service(address: str) -> None:
    """Check that a service of compose.yaml listens at the address."""
    host, _, port = address.partition(":")
    assert SERVICES[host]["ports"][0].endswith(f":{port}")

"""The image and compose.yaml: the files that they copy exist, and commands, ports and times are the server's."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from config.settings import Settings
from config.sources import env_name
from server.cli import main as cli
from server.cli.health import TIMEOUT
from server.models.files.user_cache import user_cache_dir
from server.processes.child import Timing

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
HOME = "/home/kvmux"
SETTINGS = {env_name(name) for name in Settings.model_fields} | {"KVMUX_CONFIG"}


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their arguments, lines joined, without comments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions by stage; the last stage has no name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.partition(" AS ")[2]] = current = []
        elif found:
            current.append((word, rest))
    return found


def the(instruction: str, stage: str = "") -> str:
    """Return the arguments of an instruction that a stage has once."""
    (rest,) = [rest for word, rest in stages()[stage] if word == instruction]
    return rest


def variables(text: str) -> dict[str, str]:
    """Return the variables that compose.yaml reads, with their defaults."""
    return dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))


def default(value: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m|h)", duration).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60, "h": 3600}[unit]


# ---------------------------------------------------------------- Dockerfile
def test_the_server_is_what_is_built_without_a_target() -> None:
    assert list(stages()) == ["build", "load", ""]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for stage in stages().values():
        for word, rest in stage:
            if word == "COPY" and not rest.startswith("--from="):
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists()
                    assert source == "." or f"!{source.strip('./')}" in ignored
    assert {"build"} == {match for _, rest in instructions() for match in re.findall(r"--from=(\w+)", rest)}, (
        "copied from a stage that there is"
    )


def test_what_runs_is_a_command_line_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    program, command, *flags = json.loads(the("ENTRYPOINT"))
    assert (program, command) == ("kvmux", "serve")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(cli, "serve", lambda options: seen.update(options) or 0)
    assert cli.main([command, *flags, "--port", "9000"]) == 0
    assert seen == {"host": "0.0.0.0", "port": "9000"}


def test_the_health_check_is_the_command_with_nothing_of_its_own() -> None:
    """A port here would be wrong as soon as a flag or a settings file names another one."""
    options, _, command = the("HEALTHCHECK").partition(" CMD ")
    assert json.loads(command) == ["kvmux", "health"]
    given = dict(option.removeprefix("--").split("=") for option in shlex.split(options))
    assert seconds(given["timeout"]) > TIMEOUT, "the command says why before it is ended"
    assert seconds(given["start-period"]) >= 600, "a first start fetches the model"
    assert given.keys() == {"interval", "timeout", "start-period", "retries"}


def test_caches_lie_where_the_volume_is(monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = {inside: outside for outside, inside in (v.split(":")[:2] for v in SERVICES["kvmux"]["volumes"])}
    assert volumes[f"{HOME}/.cache"] in COMPOSE["volumes"]
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_dir().parent == Path(HOME) / ".cache"
    where = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    environment = {"HOME": HOME, "PATH": os.environ["PATH"]}
    hub = subprocess.run([sys.executable, "-c", where], check=True, capture_output=True, text=True, env=environment)
    assert hub.stdout.startswith(f"{HOME}/.cache/")
    made = [rest for word, rest in stages()[""] if word == "RUN"]
    assert any(f"--owner=kvmux --group=kvmux {HOME}/.cache" in run for run in made), "else the volume is root's"
    assert (the("USER"), the("WORKDIR")) == ("kvmux", HOME)


def test_the_load_needs_nothing_but_its_extra() -> None:
    assert "['optional-dependencies']['load']" in " ".join(rest for _, rest in stages()["load"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {Requirement(each).name for each in project["optional-dependencies"]["load"]}
    assert extra == {"locust", "msgspec"}
    program, *flags = json.loads(the("ENTRYPOINT", "load"))
    assert (program, flags) == ("locust", ["-f", "loadtest/locustfile.py"])
    assert (ROOT / flags[1]).exists()


# ---------------------------------------------------------------- compose.yaml
def test_targets_are_stages() -> None:
    for name, service in SERVICES.items():
        if "build" in service:
            assert service["build"].get("target", "") in stages(), name


def test_a_stop_waits_as_long_as_the_server_may_take() -> None:
    drain, timing = Settings.model_fields["drain_seconds"].default, Timing()
    longest = drain + timing.worker_margin + timing.engine_grace
    assert seconds(default(SERVICES["kvmux"]["stop_grace_period"])) > longest
    page = (ROOT / "docs" / "operations" / "deploying.md").read_text()
    for told in re.findall(r"--stop-timeout (\d+)", page + (ROOT / "Dockerfile").read_text()):
        assert int(told) > longest


def test_the_health_check_is_the_images_with_a_start_period_of_its_own() -> None:
    assert SERVICES["kvmux"]["healthcheck"].keys() == {"start_period"}, "what is left out the image has"
    assert f"--start-period={default(SERVICES['kvmux']['healthcheck']['start_period'])} " in the("HEALTHCHECK")


def test_the_port_inside_is_the_one_that_is_mapped_and_scraped() -> None:
    environment = SERVICES["kvmux"]["environment"]
    assert environment.keys() - {"HF_TOKEN"} <= SETTINGS
    (mapped,) = SERVICES["kvmux"]["ports"]
    assert mapped.endswith(f":{environment['KVMUX_PORT']}")
    assert the("EXPOSE") == environment["KVMUX_PORT"]
    assert SERVICES["load"]["environment"]["LOCUST_HOST"] == f"http://kvmux:{environment['KVMUX_PORT']}"


def test_the_load_waits_for_the_server_and_only_when_asked() -> None:
    load = SERVICES["load"]
    assert load["profiles"] == ["load"]
    assert load["depends_on"] == {"kvmux": {"condition": "service_healthy"}}
    assert all("profiles" not in SERVICES[name] for name in SERVICES if name != "load")


def test_variables_of_the_load_are_locusts_or_ours() -> None:
    code = """if True:  # in a process of its own, as locust replaces sockets and threads
        import locust.argument_parser
        import loadtest.locustfile
        print(*(getattr(action, "env_var", None) for action in locust.argument_parser.get_parser()._actions))
    """
    known = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert {"LOCUST_HOST", "LOCUST_STRATEGIES"} <= set(known.split())
    assert SERVICES["load"]["environment"].keys() <= set(known.split())
    assert the("EXPOSE", "load") in SERVICES["load"]["ports"][0]


def test_the_page_tells_every_variable_and_default() -> None:
    page = (ROOT / "docs" / "operations" / "deploying.md").read_text()
    rows = [line for line in page.partition("## Compose")[2].splitlines() if line.startswith("| `")]
    text = (ROOT / "compose.yaml").read_text()
    environments = (service.get("environment", {}) for service in SERVICES.values())
    passed = {name for environment in environments for name, value in environment.items() if value is None}
    for name in variables(text).keys() | passed:
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        value = variables(text).get(name)
        assert not value or value in row, f"{name} has the default {value}"

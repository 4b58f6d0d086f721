"""The layout is the architecture: who may import whom, read from the source, so that it stays so."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("config", "kernels", "cache_strategies", "server", "loadtest", "tools")

MAY_IMPORT = {  # beside itself
    "config": set[str](),
    "kernels": {"config"},
    "cache_strategies": {"config", "kernels"},
    "server": {"config", "kernels", "cache_strategies"},
    "loadtest": set[str](),
    "tools": {"config", "loadtest"},  # not installed; they see the server as its users do, from outside
}
AND_FLAGS = {"server.cli.main": {"loadtest.bench", "loadtest.bench.flags"}}  # of `kvmux bench`; nothing else of it

API_PROCESS = (
    "server.cli.main",
    "server.api.worker",
    "server.processes.supervisor",
    "server.engine.ipc.client",
    "server.text",
)
HEAVY = {"torch", "transformers", "numpy", "kernels", "cache_strategies"}


def modules() -> dict[str, Path]:
    """Every module of the project by name."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


@cache
def imports(file: Path, *, typing_only: bool = False) -> frozenset[str]:
    """Modules a file imports at run time; with typing_only also those that only type checkers see."""
    found = set[str]()
    tree = ast.parse(file.read_text())
    hidden = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden and not typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def top(module: str) -> str:
    return module.partition(".")[0]


@cache
def reached(module: str) -> frozenset[str]:
    """Everything that importing `module` imports, directly or not, functions' own imports included."""
    known, seen, todo = modules(), set[str](), [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        todo += parents
        if name in known:
            todo += imports(known[name])
    return frozenset(seen)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_downwards(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for name, file in modules().items():
        if top(name) == package:
            imported = {m for m in imports(file, typing_only=True) if top(m) in PACKAGES}
            wrong = {m for m in imported if top(m) not in allowed} - AND_FLAGS.get(name, set())
            assert not wrong, f"{name} imports {wrong}"


def test_load_is_made_without_anything_heavy() -> None:
    """Flags come with every start of the command line, so they have nothing at all."""
    for name in modules():
        if top(name) == "loadtest":
            assert not {m for m in reached(name) if top(m) in HEAVY}, name
    light = {"loadtest", *sys.stdlib_module_names}
    assert {top(m) for m in reached("loadtest.bench.flags")} <= light


def test_only_the_client_of_a_benchmark_knows_http_and_it_knows_no_workload() -> None:
    bench = [name for name in modules() if name.startswith("loadtest.bench.")]
    with_http = {name for name in bench if "httpx" in reached(name)}
    assert with_http == {"loadtest.bench.client", "loadtest.bench.command"}
    assert "loadtest.bench.workloads" not in reached("loadtest.bench.client")


def test_what_the_command_line_finds_by_name_is_there() -> None:
    named = re.findall(r'resolve_name\("([^":]+)', modules()["server.cli.main"].read_text())
    assert "loadtest.bench.command" in named
    assert set(named) <= modules().keys()


def test_models_know_no_strategy_and_no_engine() -> None:
    for name, file in modules().items():
        if name.startswith("server.models"):
            assert not {
                m for m in imports(file, typing_only=True) if m.startswith(("cache_strategies", "server.engine"))
            }


def test_profiles_and_benchmarks_stand_on_the_same_and_not_on_each_other() -> None:
    apart = ("server.profiling", "tools.bench")
    for name, file in modules().items():
        if name.startswith(("server.measuring", *apart)):
            others = tuple(package for package in apart if not name.startswith(package))
            assert not {m for m in imports(file, typing_only=True) if m.startswith(others)}, name


def test_the_server_reaches_neither_the_textbook_nor_the_adapter_for_transformers() -> None:
    for name in modules():
        if top(name) == "server":
            assert not reached(name) & {
                "cache_strategies.adapters.textbook",
                "cache_strategies.adapters.transformers",
            }, name


def test_text_without_a_server_needs_no_server() -> None:
    assert not {top(m) for m in reached("server.llm")} & {"fastapi", "starlette", "uvicorn", "prometheus_client"}
    assert not reached("server.llm") & {
        "server.engine.ipc.server",
        "server.engine.ipc.client",
        "server.processes.supervisor",
    }


def test_the_textbook_stands_alone() -> None:
    assert {top(m) for m in imports(modules()["cache_strategies.adapters.textbook"])} <= {"__future__", "math", "torch"}


def test_strategies_know_each_other_only_through_their_parts() -> None:
    strategies = {"contiguous", "sliding_window", "paged"}
    for name in strategies:
        imported = {m.split(".")[1] for m in imports(modules()[f"cache_strategies.{name}"]) if m.count(".")}
        assert not imported & (strategies - {name})


@pytest.mark.parametrize(
    "name",
    ["server.engine.scheduling.scheduler", "server.engine.scheduling.request", "server.engine.scheduling.selection"],
)
def test_the_scheduler_has_no_tensor_and_no_strategy(name: str) -> None:
    assert not {m for m in reached(name) if top(m) in {"torch", "numpy", "kernels", "cache_strategies"}}


@pytest.mark.parametrize("name", [n for n in modules() if n.startswith(API_PROCESS) or n.startswith("server.api")])
def test_supervisor_and_api_processes_reach_neither_torch_nor_transformers(name: str) -> None:
    assert not {m for m in reached(name) if top(m) in HEAVY}


def test_the_process_that_tokenizes_reaches_neither_http_nor_settings() -> None:
    """It is started again whenever it had to be killed, and has nothing in it that a model's files could misuse."""
    other = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_settings", "httpx", "psutil", "prometheus_client"}
    assert not {m for m in reached("server.text.processes.sandbox_process") if top(m) in HEAVY | other}


def test_only_reference_and_loader_are_imported_as_kernels_by_others() -> None:
    """Operations are called through the `Ops` a component was given, not by importing a backend.

    The engine gives them; outside the server whoever builds a strategy alone does, and the replay of traces. The doctor
    looks at all of them.
    """
    giving = {"server.engine.build", "server.cli.doctor", "cache_strategies.standalone", "cache_strategies.replay"}
    for name, file in modules().items():
        if top(name) in ("cache_strategies", "server") and name not in giving:
            assert not {m for m in imports(file) if m.startswith(("kernels.reference", "kernels.backends"))}, name

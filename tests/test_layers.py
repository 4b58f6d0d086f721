"""The layout is the architecture: who may import whom, read from the source, so that it stays so."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("config", "kernels", "cache_strategies", "server", "loadtest", "plugin_kit", "metal_emulator", "tools")

MAY_IMPORT = {  # beside itself
    "config": set[str](),
    "kernels": {"config"},
    "cache_strategies": {"config", "kernels"},
    "server": {"config", "kernels", "cache_strategies"},
    "loadtest": set[str](),
    "plugin_kit": {"config", "kernels", "cache_strategies", "server"},  # its command is found by name
    "metal_emulator": {"kernels"},  # which loads it by name, if it is installed
    "tools": {"config", "kernels", "cache_strategies", "server", "loadtest"},  # not installed, and imported by none
}
ALSO = {
    "server.cli.main": {"loadtest.bench", "loadtest.bench.flags"},  # of `kvmux bench`; nothing else of it
    "loadtest.bench.flags": {
        "config.flags",
        *(f"config.flags.{name}" for name in ("Kind", "COUNT", "DURATION", "FILE", "SWITCH")),
        *(f"config.flags.{name}" for name in ("add_flags", "flag", "number_flag")),
    },
    "loadtest.bench.command": {
        "config.errors",
        *(f"config.errors.{name}" for name in ("SettingsError", "convert_write_errors")),
    },
    "loadtest.bench.report": {"config.tables", "config.tables.format_table"},
    "loadtest.traces": {"config.quantities", "config.quantities.parse_share_flag"},
}

API_PROCESS = (
    "server.cli.main",
    "server.api.worker",
    "server.processes.supervisor",
    "server.engine.ipc.client",
    "server.text",
)
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # and what has statements in it
HEAVY = {"torch", "transformers", "numpy", "kernels", "cache_strategies"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the project by name."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path, *, typing_only: bool = False) -> frozenset[str]:
    """Modules a file imports at run time; with typing_only also those that only type checkers see."""
    at_run_time, hidden = find_imports(file)
    return at_run_time | hidden if typing_only else at_run_time


@cache
def find_imports(file: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Modules a file imports at run time, and those under TYPE_CHECKING. Looks into statements: only they import."""
    at_run_time, hidden = set[str](), set[str]()
    todo: list[tuple[ast.AST, set[str]]] = [(parse(file), at_run_time)]
    while todo:
        node, found = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found = hidden
        todo += [(child, found) for child in ast.iter_child_nodes(node) if isinstance(child, STATEMENTS)]
    return frozenset(at_run_time), frozenset(hidden)


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
            wrong = {m for m in imported if top(m) not in allowed} - ALSO.get(name, set())
            assert not wrong, f"{name} imports {wrong}"


def test_load_is_made_without_anything_heavy() -> None:
    """Flags come with every start of the command line, so they have nothing at all."""
    for name in modules():
        if top(name) == "loadtest":
            assert not {m for m in reached(name) if top(m) in HEAVY}, name
    light = {"loadtest", "config", *sys.stdlib_module_names}
    assert {top(m) for m in reached("loadtest.bench.flags")} <= light


def test_only_the_client_of_a_benchmark_knows_http_and_it_knows_no_workload() -> None:
    bench = [name for name in modules() if name.startswith("loadtest.bench.")]
    with_http = {name for name in bench if "httpx" in reached(name)}
    assert with_http == {"loadtest.bench.client", "loadtest.bench.command"}
    assert "loadtest.bench.workloads" not in reached("loadtest.bench.client")


def test_what_the_command_line_finds_by_name_is_there() -> None:
    cli = [file.read_text() for name, file in modules().items() if name.startswith("server.cli.")]
    named = re.findall(r'(?:resolve_name|import_later)\("([^":]+)', "".join(cli))
    assert {"loadtest.bench.command", "plugin_kit.command"} <= set(named)
    assert set(named) <= modules().keys()


def test_models_know_no_strategy_and_no_engine() -> None:
    for name, file in modules().items():
        if name.startswith("server.models"):
            assert not {
                m for m in imports(file, typing_only=True) if m.startswith(("cache_strategies", "server.engine"))
            }


def test_tools_that_torture_a_server_see_it_from_outside() -> None:
    outside = ("tools.torture", "tools.chaos", "tools.soak")
    for name, file in modules().items():
        if name.startswith(outside):
            assert not {m for m in imports(file) if top(m) in ("kernels", "cache_strategies", "server")}, name


def test_the_engine_names_no_backend_and_no_metrics() -> None:
    """It gets operations from `kernels.backends`, and what counts its steps from the process that it runs in."""
    others = ("kernels.cpu", "kernels.metal", "kernels.reference", "server.metrics")
    for name, file in modules().items():
        if name.startswith("server.engine"):
            assert not {m for m in imports(file, typing_only=True) if m.startswith(others)}, name


def test_metrics_import_no_engine() -> None:
    """What the one writes and the other counts is in `server.records`, which imports neither."""
    for name, file in modules().items():
        if name.startswith("server.metrics"):
            assert not {m for m in imports(file, typing_only=True) if m.startswith("server.engine")}, name
    assert not {m for m in reached("server.records") if m.startswith(("server.engine", "server.metrics"))}


def test_an_evaluation_needs_no_code_that_trains() -> None:
    assert not {m for m in reached("server.evaluation.command") if m.startswith("tools")}


def test_kernels_know_no_owners_of_memory() -> None:
    """Pages of memory have no owners in kernels; what may be evicted, and when, strategies decide."""
    for name, file in modules().items():
        if top(name) == "kernels":
            words = set(re.findall(r"\w+", file.read_text().lower()))
            assert not words & {"evict", "eviction", "evicted"}, name


def test_kernels_that_serve_import_neither_the_tables_of_the_selfcheck_nor_the_emulator() -> None:
    """Only the loader calls the self-check; operations are named in `kernels.ops`."""
    others = ("kernels.selfcheck", "metal_emulator")
    for name, file in modules().items():
        if top(name) == "kernels" and not name.startswith("kernels.selfcheck"):
            found = {m for m in imports(file, typing_only=True) if m.startswith(others)}
            checks = {m for m in found if name == "kernels.backends" and m.startswith("kernels.selfcheck.check")}
            assert not found - checks, name


def test_no_modules_import_each_other() -> None:
    """Directly or in a circle, under TYPE_CHECKING too."""
    known = modules()
    graph = {name: {m for m in imports(file, typing_only=True) if m in known} - {name} for name, file in known.items()}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_scheduling_knows_neither_isolation_nor_optional_features() -> None:
    others = ("isolation", "rollouts", "shadow", "grammar", "extension", "core")
    for name, file in modules().items():
        if name.startswith("server.engine.scheduling"):
            assert not {m for m in imports(file, typing_only=True) if m.startswith(_of_the_engine(others))}, name


def test_the_core_knows_optional_features_by_their_hooks_only() -> None:
    features = ("rollouts", "shadow", "grammar", "isolation.fallbacks")
    for name in ("server.engine.core", "server.engine.extension", "server.engine.model_runner"):
        assert not {m for m in imports(modules()[name], typing_only=True) if m.startswith(_of_the_engine(features))}


def test_the_engine_names_no_strategy() -> None:
    kinds = re.compile(r"\b(contiguous|sliding_window|paged|compressed|streaming|quest|mirrored)\b")
    for name, file in modules().items():
        if name.startswith("server.engine"):
            named = {node.value for node in ast.walk(parse(file)) if isinstance(node, ast.Constant)}
            assert not {value for value in named if isinstance(value, str) and kinds.search(value)}, name


def _of_the_engine(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"server.engine.{name}" for name in names)


OTHER_TESTS = {
    "clients": "other people's clients, each by itself",
    "contract": "every strategy, through the interface alone",
    "end_to_end": "whole servers",
    "fuzzing": "what random tests have in common",
    "real": "real models, served as users serve them",
}


def test_tests_lie_as_the_product_does() -> None:
    """A folder of tests has its package's path, without `server/` where that is its beginning."""
    tests = ROOT / "tests"
    for file in tests.rglob("test_*.py"):
        folder = file.parent.relative_to(tests)
        mirrored = any((package / folder / "__init__.py").exists() for package in (ROOT, ROOT / "server"))
        assert folder == Path() or folder.parts[0] in OTHER_TESTS or mirrored, file


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
    strategies = {"contiguous", "sliding_window", "paged.cache"}
    for name in strategies:
        others = tuple(f"cache_strategies.{other}" for other in strategies - {name})
        assert not {m for m in imports(modules()[f"cache_strategies.{name}"]) if m.startswith(others)}


@pytest.mark.parametrize(
    "name",
    ["server.engine.scheduling.scheduler", "server.engine.scheduling.request", "server.engine.scheduling.selection"],
)
def test_the_scheduler_has_no_tensor_and_no_strategy(name: str) -> None:
    heavy = {m for m in reached(name) if top(m) in {"torch", "numpy", "kernels", "cache_strategies"}}
    assert heavy <= {"cache_strategies", "cache_strategies.errors", "cache_strategies.errors.StrategyError"}


@pytest.mark.parametrize("name", [n for n in modules() if n.startswith(API_PROCESS) or n.startswith("server.api")])
def test_supervisor_and_api_processes_reach_neither_torch_nor_transformers(name: str) -> None:
    assert not {m for m in reached(name) if top(m) in HEAVY}


def test_the_process_that_tokenizes_reaches_neither_http_nor_settings() -> None:
    """It is started again whenever it had to be killed, and has nothing in it that a model's files could misuse."""
    other = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_settings", "httpx", "psutil", "prometheus_client"}
    assert not {m for m in reached("server.text.processes.sandbox_process") if top(m) in HEAVY | other}


def test_only_reference_and_loader_are_imported_as_kernels_by_others() -> None:
    """Operations are called through the `Ops` a component was given, not by importing a backend.

    The engine gives them; outside the server whoever builds a strategy alone does. The doctor looks at all of them.
    """
    giving = {
        "server.engine.build",
        "server.cli.doctor",
        "server.cli.model_report",
        "cache_strategies.adapters.standalone",
    }
    for name, file in modules().items():
        if top(name) in ("cache_strategies", "server") and name not in giving:
            assert not {m for m in imports(file) if m.startswith(("kernels.reference", "kernels.backends"))}, name


SAME_NAME = {
    "Choice": "a choice of OpenAI's API, as the server writes it and as load tests read it",
    "Cancel": "a message to the engine, and a kind of user that locust's command line names",
    "Completion": "a result of `LLM`, and likewise",
    "Delta": "as Choice",
    "Usage": "as Choice",
    "KVCache": "the seam, and the textbook's own, which stands alone",
}


def test_no_two_classes_of_the_product_have_one_name() -> None:
    classes = Counter(
        node.name
        for name, file in modules().items()
        if top(name) != "tools"
        for node in parse(file).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == SAME_NAME.keys()

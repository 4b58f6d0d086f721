"""The promises of the classes that `--kvmux-strategy` names, as tests; see pytest_plugin.py."""

from __future__ import annotations

import pytest

from config.errors import SettingsError
from plugin_kit.cases import list_cases
from plugin_kit.promise import CheckCase


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each promise and each variant of the options."""
    names: list[str] = metafunc.config.getoption("--kvmux-strategy", default=[])
    if not names:
        raise pytest.UsageError("name the class that is to be tested: --kvmux-strategy MODULE:CLASS")
    try:
        found = {name: list_cases(name, metafunc.config.getoption("--kvmux-seed")) for name in names}
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    cases = [pytest.param(case, id=f"{name}-{case}") for name, of_class in found.items() for case in of_class]
    metafunc.parametrize("case", cases)


def test_promise(case: CheckCase) -> None:
    """Check a promise of a class; skip it if the class does not make it."""
    if not case.check():
        pytest.skip("the class does not promise this")

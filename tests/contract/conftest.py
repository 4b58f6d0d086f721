"""The contract tests run with the kernels that an engine on this CPU uses; those marked `every_backend` with all.

What a strategy keeps does not depend on the backend. Each backend's operations are compared in tests/kernels, with the
layouts of all strategies; here each computes batches of all strategies, and exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract import harness, kinds
from tests.kernels.backend_matrix import BACKENDS, FASTEST, NAMES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = NAMES if metafunc.definition.get_closest_marker("every_backend") else [FASTEST]
    metafunc.parametrize("backend", names, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the name of the kernel backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "make_ops", BACKENDS[request.param])
        yield request.param


@pytest.fixture(autouse=True)
def _kinds_are_installed() -> Iterator[None]:
    """Register the kinds of tests/contract/kinds, as if they were installed packages."""
    with kinds.installed():
        yield

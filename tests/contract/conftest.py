"""The contract tests run with every kernel backend that works on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract import harness, kinds
from tests.kernels.backend_matrix import BACKENDS, NAMES


@pytest.fixture(scope="module", autouse=True, params=NAMES)
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

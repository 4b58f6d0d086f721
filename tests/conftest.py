"""The tests see no setting of the shell they run in."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KVMUX_"):
            monkeypatch.delenv(name)

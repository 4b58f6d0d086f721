"""The tiny random model that the engine's tests use, too."""

from tests.engine.conftest import tiny as tiny

"""Records what the engine's first steps launch on Apple's GPU, as a trace for Xcode's Metal debugger.

torch writes the trace into the folder in which the server was started. Knows neither steps nor kernels.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from typing import Self

import torch

from config.errors import SettingsError
from kernels.device import Device

log = logging.getLogger(__name__)

TRACE_NAME = "kvmux"
TRACE_FILE = f"0000-{TRACE_NAME}.gputrace"  # the file that torch writes for a capture named TRACE_NAME


class Capture:
    """A capture of what is launched on Apple's GPU; it ends after a number of steps, or with its `with` block."""

    def __init__(self, steps: int, capturing: AbstractContextManager[None] | None) -> None:
        """Begin to capture by entering `capturing`, if given; it is left after `steps` calls of count_step."""
        self._steps_left = steps
        self._exit_stack = ExitStack()
        if capturing is not None:
            self._exit_stack.enter_context(capturing)

    @classmethod
    def begin(cls, steps: int | None, device: Device) -> Self:
        """Return a capture of `steps` steps; one that does nothing for None. Raises SettingsError if Metal refuses."""
        if steps is None:
            return cls(0, None)
        if device.name != "mps":
            raise SettingsError(f"metal_capture_steps: there are no Metal launches to capture on {device.name}")
        if not torch.mps.profiler.is_metal_capture_enabled():
            raise SettingsError(
                "metal_capture_steps: Metal allows no capture; start the server with MTL_CAPTURE_ENABLED=1 in its "
                "environment"
            )
        try:
            return cls(steps, torch.mps.profiler.metal_capture(TRACE_NAME))
        except RuntimeError as error:  # for example, the file exists or the disk is full
            raise SettingsError(f"metal_capture_steps: {TRACE_FILE} cannot be captured: {error}") from None

    def count_step(self) -> None:
        """Count a step; after the last one the trace is written."""
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self._exit_stack.close()
            log.info("the Metal launches of the first steps are in %s", TRACE_FILE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._steps_left = 0
        self._exit_stack.close()

"""Records steps of the running engine with torch's profiler: one recording at a time, limited in steps and seconds.

The engine's thread starts and stops torch's profiler, which records only that thread; a helper thread writes the trace.
Knows messages, operations and steps, but no socket. A failure in here ends the recording, but no request.
"""

from __future__ import annotations

import gzip
import logging
import os
import queue
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import torch
from torch.autograd.profiler import profile  # instead of torch.profiler.profile, which imports torch's compiler
from torch.profiler import record_function

from kernels.ops import FORWARD_LAYERS
from kernels.tracing import NULL_CONTEXT, Recorder, Tracer
from server.engine.ipc.messages import Answer, Failed, Profile
from server.engine.profiling.trace_table import make_table
from server.engine.scheduling.request import RequestError

log = logging.getLogger(__name__)

STEP = "step"  # the name of a step in the trace
MAX_TRACE_BYTES = 256 * 2**20
FAILED_MESSAGE = "profiling failed; the server's log has the cause, and requests go on"
BUSY_MESSAGE = "steps are being profiled, or their trace is written; try again when that is done"
QUIET_KINETO_LEVEL = "99"  # KINETO_LOG_LEVEL at which torch's profiler prints no lines of its own into the log


class OpAnnotator(Recorder):
    """Names each part of a step, and each call of an operation, in the trace of torch's profiler."""

    def __init__(self) -> None:
        # Total seconds by name of operation, for operations within compiled layers
        self.layer_op_seconds: defaultdict[str, float] = defaultdict(float)

    def op(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
        return record_function(name)

    def layers(self) -> AbstractContextManager[object]:
        return record_function(FORWARD_LAYERS)

    def span(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)

    def add_seconds(self, name: str, seconds: float) -> None:
        self.layer_op_seconds[name] += seconds


@dataclass
class Recording:
    """A recording in progress, which answers a query of an API worker."""

    worker: int
    query_id: int
    limits: Profile
    torch_profiler: profile
    annotator: OpAnnotator
    exit_stack: ExitStack  # closing it ends the recording by torch's profiler
    started_at: float  # when recording began, in seconds of the monotonic clock
    steps: int = 0  # number of steps recorded so far

    def is_over(self) -> bool:
        return self.steps >= self.limits.steps or monotonic() - self.started_at >= self.limits.seconds


class Profiler:
    """Records steps on request. Without a recording, a step costs no more than two reads of an attribute."""

    def __init__(self, tracer: Tracer, device: torch.device, about: Mapping[str, Any]) -> None:
        """Make the profiler of an engine; `about` describes the engine in each trace."""
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET_KINETO_LEVEL)
        self._tracer = tracer
        self._device = "cuda" if device.type == "cuda" else None  # with "cuda" the GPU's kernels are recorded, too
        self._about = about
        self._busy = False  # True from the arrival of a query for a recording until its answer is returned
        self._recording: Recording | None = None
        # Answers that after_step has not returned yet, each with its API worker
        self._done: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()

    def begin(self, worker: int, query_id: int, wanted: Profile) -> Answer | None:
        """Begin to record with the next step; return an answer only if the recording is refused, else None."""
        if self._busy:
            return _make_refusal(query_id, RequestError(409, BUSY_MESSAGE, code="profile_running"))
        self._busy = True
        exit_stack = ExitStack()
        try:
            torch_profiler = exit_stack.enter_context(profile(use_device=self._device, use_kineto=True))
            operations = exit_stack.enter_context(self._tracer.record(OpAnnotator()))
        except Exception:
            self._fail(worker, query_id, exit_stack)
        else:
            self._recording = Recording(worker, query_id, wanted, torch_profiler, operations, exit_stack, monotonic())
        return None

    def annotate_step(self, busy: bool) -> AbstractContextManager[object]:
        """Return the context manager in which to run a step; `busy` tells whether there are requests."""
        if not self._busy:
            return NULL_CONTEXT
        recording = self._recording
        return record_function(STEP) if recording is not None and busy else NULL_CONTEXT

    def after_step(self, rows: int) -> tuple[int, Answer] | None:
        """End the recording if it is over; return (API worker, answer) once an answer is ready, else None.

        `rows` is the number of rows of the step that has just run.
        """
        if not self._busy:
            return None
        recording = self._recording
        if recording is not None:
            recording.steps += bool(rows)
            if recording.is_over():
                self._recording = None
                self._end(recording)
            return None
        try:
            done = self._done.get_nowait()
        except queue.Empty:
            return None
        self._busy = False
        return done

    def _end(self, recording: Recording) -> None:
        seconds = monotonic() - recording.started_at
        try:
            recording.exit_stack.close()
            threading.Thread(target=self._write, args=(recording, seconds), name="profiler", daemon=True).start()
        except Exception:
            self._fail(recording.worker, recording.query_id)

    def _fail(self, worker: int, query_id: int, exit_stack: ExitStack | None = None) -> None:
        """Answer the query with an error, and log the exception that is being handled."""
        log.exception("profiling failed")
        self._done.put((worker, _make_refusal(query_id, RequestError(500, FAILED_MESSAGE))))
        if exit_stack is not None:
            try:
                exit_stack.close()
            except Exception:
                log.exception("torch's profiler could not be stopped")

    def _write(self, recording: Recording, seconds: float) -> None:
        """Write the trace and answer the query; runs in a helper thread."""
        try:
            answer = Answer(recording.query_id, self._pack_trace(recording, seconds), created_at=monotonic())
        except RequestError as error:
            answer = _make_refusal(recording.query_id, error)
        except Exception:
            self._fail(recording.worker, recording.query_id)
            return
        self._done.put((recording.worker, answer))

    def _pack_trace(self, recording: Recording, seconds: float) -> bytes:
        """Return the trace and a summary as gzipped JSON. Raises RequestError if the trace exceeds MAX_TRACE_BYTES."""
        trace = _export_trace(recording.torch_profiler)
        summary = {
            **self._about,
            "steps": recording.steps,
            "seconds": seconds,
            "table": make_table(trace),
            "in_layers": dict(recording.annotator.layer_op_seconds),
        }
        return gzip.compress(_insert_member(trace, "kvmux", summary), compresslevel=3)


def _export_trace(torch_profiler: profile) -> bytes:
    """Return the recording as JSON (Chrome's trace format). Raises RequestError if it exceeds MAX_TRACE_BYTES."""
    with tempfile.TemporaryDirectory(prefix="kvmux-profile-") as folder:
        file = Path(folder) / "trace.json"
        torch_profiler.export_chrome_trace(str(file))
        size = file.stat().st_size
        if size > MAX_TRACE_BYTES:
            raise RequestError(
                409,
                f"the trace has {size} bytes, more than the maximum of {MAX_TRACE_BYTES}: ask for fewer steps",
                code="too_large",
            )
        return file.read_bytes()


def _insert_member(trace: bytes, name: str, value: object) -> bytes:
    """Return a JSON object with one more member, without parsing it: a trace may have millions of events."""
    brace = trace.index(b"{") + 1
    return trace[:brace] + msgspec.json.encode(name) + b":" + msgspec.json.encode(value) + b"," + trace[brace:]


def _make_refusal(query_id: int, error: RequestError) -> Answer:
    failed: Failed = error.to_message()
    return Answer(query_id, b"", failed, monotonic())

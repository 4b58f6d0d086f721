"""Describes a failed launch in a sentence. The structures are those of runtime/failure.h."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Sequence
from enum import IntEnum


class Fault(IntEnum):
    NONE = 0
    RACE = 1
    OUT_OF_BOUNDS = 2
    MISALIGNED = 3
    WRITE_TO_CONST = 4
    DIVERGENCE = 5
    TOO_MANY_BYTES = 6
    NO_LANE = 7
    OTHER_LANE = 8
    DIVISION = 9
    CRASH = 10


ACTS = ("read", "write", "atomic read", "atomic write", "waits", "has returned", "division", "crash")
WAITS, RETURNED = 4, 5
THREADGROUP = 1


class Party(ctypes.Structure):
    _fields_ = (
        ("act", ctypes.c_int),
        ("thread", ctypes.c_uint),
        ("group", ctypes.c_uint),
        ("code", ctypes.c_uint),
        ("operation", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint),
        ("column", ctypes.c_uint),
        ("flags", ctypes.c_int),
    )


class AccessedMemory(ctypes.Structure):
    _fields_ = (
        ("space", ctypes.c_int),
        ("index", ctypes.c_int),
        ("offset", ctypes.c_long),
        ("bytes", ctypes.c_long),
        ("access", ctypes.c_uint),
    )


class Failure(ctypes.Structure):
    _fields_ = (("fault", ctypes.c_int), ("first", Party), ("second", Party), ("memory", AccessedMemory))


class KernelFault(RuntimeError):
    """Raised if a kernel did something that is invalid on a GPU; the message says what and where."""


class FailureReporter:
    """Formats the failure that ended a launch of a kernel as a message: what the kernel did wrong, and where."""

    def __init__(
        self,
        arguments: Sequence[tuple[str, int]],  # of each argument: declared name, bytes of an element
        variables: Sequence[str],
        grid: tuple[int, int, int],
        group: tuple[int, int, int],
        line_of: Callable[[int], str],  # returns file:line for the return address of a call
    ) -> None:
        self._arguments = arguments
        self._variables = variables
        self._grid = grid
        self._group = group
        self._line_of = line_of

    def format_failure(self, failure: Failure) -> str:
        first, second, memory = failure.first, failure.second, failure.memory
        match Fault(failure.fault):
            case Fault.RACE:
                accesses = f"{self._format_access(first, memory)}; earlier {self._format_access(second)}"
                return f"data race on {self._format_place(memory)}: {accesses}; {self._suggest_fix(failure)}"
            case Fault.OUT_OF_BOUNDS:
                return f"out of bounds: {self._format_access(first, memory)}, {self._format_overrun(memory)}"
            case Fault.MISALIGNED:
                access, place = self._format_access(first, memory), self._format_place(memory)
                return f"misaligned: {access} at {place} is not a multiple of its size"
            case Fault.WRITE_TO_CONST:
                return f"write to constant {self._format_place(memory)}: {self._format_access(first, memory)}"
            case Fault.TOO_MANY_BYTES:
                name = self._variables[memory.index]
                return f"'{name}' makes {memory.offset} bytes of threadgroup memory, and Metal has 32768"
            case Fault.NO_LANE:
                return (
                    f"no such lane: {self._format_thread(first)} asks for lane {memory.offset} in "
                    f"{_format_operation(first)}, and its simdgroup has {memory.bytes}: ask only for lanes that "
                    "there are"
                )
            case Fault.OTHER_LANE:
                return (
                    f"different lanes: {self._format_thread(first)} and {self._format_thread(second)} do not ask for "
                    f"the same lane in {_format_operation(first)}: use simd_shuffle"
                )
            case Fault.DIVISION:
                return f"{self._format_access(first)}: an integer is divided by zero, or the least one by -1"
            case Fault.CRASH:
                return (
                    f"{self._format_access(first)}: {_format_signal(memory)}. Memory of the process may be damaged: "
                    "run it with checked=True, which finds such an access before it is made"
                )
        return self._format_divergence(first, second)

    def _format_divergence(self, first: Party, second: Party) -> str:
        column = WAITS == first.act == second.act and (first.file, first.line) == (second.file, second.line)
        same = column and first.column == second.column and first.operation == second.operation
        cure = "all threads must come to the same one"
        return (
            f"divergence: {self._format_wait(first, column)}, but {self._format_wait(second, column)}: "
            f"{'all must give it the same flags' if same else cure}"
        )

    def _format_access(self, party: Party, memory: AccessedMemory | None = None) -> str:
        size = f" of {memory.access} bytes" if memory is not None else ""
        line = self._line_of(party.code) if party.code else ""
        return f"{ACTS[party.act]}{size} by {self._format_thread(party)}{f' at {line}' if line else ''}"

    def _format_wait(self, party: Party, column: bool) -> str:
        if party.act == RETURNED:
            return f"{self._format_thread(party)} has returned"
        return f"{self._format_thread(party)} waits in {_format_operation(party)}{f':{party.column}' if column else ''}"

    def _format_thread(self, party: Party) -> str:
        groups = tuple(-(-threads // each) for threads, each in zip(self._grid, self._group, strict=True))
        group = _unravel_index(party.group, groups)
        size = tuple(
            min(each, threads - each * at) for each, threads, at in zip(self._group, self._grid, group, strict=True)
        )
        thread = _format_position(_unravel_index(party.thread, size), self._grid)
        return f"thread {thread} of group {_format_position(group, self._grid)}"

    def _format_place(self, memory: AccessedMemory) -> str:
        if memory.space == THREADGROUP:
            return f"threadgroup variable '{self._variables[memory.index]}', byte {memory.offset}"
        name, size = self._arguments[memory.index]
        return f"argument {memory.index} '{name}', element {memory.offset // size} (byte {memory.offset})"

    def _format_overrun(self, memory: AccessedMemory) -> str:
        if memory.index < 0:
            return "nowhere near any argument"
        before = memory.offset < 0
        by = -memory.offset if before else memory.offset + memory.access - memory.bytes
        place = self._format_place(memory).split(", ")[0]
        side = "before the begin" if before else "beyond the end"
        return f"{by} bytes {side} of {place}, which has {memory.bytes} bytes"

    def _suggest_fix(self, failure: Failure) -> str:
        if failure.first.group != failure.second.group:
            return "nothing orders threadgroups: let one write it, or use atomics"
        kind = "mem_threadgroup" if failure.memory.space == THREADGROUP else "mem_device"
        return f"no barrier with mem_flags::{kind} between them"


def _format_signal(memory: AccessedMemory) -> str:
    """Format a signal and its address, such as "SIGSEGV at address 0x0"; an abort has no address."""
    number = signal.Signals(memory.index)
    return number.name if number is signal.SIGABRT else f"{number.name} at address {memory.offset:#x}"


def _format_operation(party: Party) -> str:
    return f"{party.operation.decode()} at {party.file.decode()}:{party.line}"


def _unravel_index(index: int, size: tuple[int, ...]) -> tuple[int, ...]:
    return index % size[0], index // size[0] % size[1], index // (size[0] * size[1])


def _format_position(position: tuple[int, ...], grid: tuple[int, int, int]) -> str:
    """Format a position in the grid with as many dimensions as the launch has."""
    dimensions = 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1
    return str(position[0]) if dimensions == 1 else str(position[:dimensions])

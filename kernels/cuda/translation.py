"""Translates the Metal kernels to CUDA C++: only the heads of kernels are rewritten, and threadgroup variables.

All else is left to metal_stdlib in this folder. Understands the Metal that our sources are written in, no more.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Threadgroups of the largest size that a multiprocessor shall run at the same time, which leaves each thread 128
# registers, as many as a thread of an Apple GPU has.
GROUPS_AT_ONCE = 2

_COMMENT = re.compile(r"//[^\n]*")
_VARIABLE = re.compile(r"\bthreadgroup (\w+) (?=\w+\[)")
_KERNEL = re.compile(
    r"(?P<template>template <[^>]*>\s*)?(?:\[\[max_total_threads_per_threadgroup\((?P<limit>\w+)\)\]\]\s*)?"
    r"kernel void (?P<name>\w+)\((?P<parameters>.*?)\)\s*\{",
    re.DOTALL,
)
_PARAMETER = re.compile(r"(?P<type>[^,]+?) (?P<name>\w+) \[\[(?P<attribute>\w+)(?:\(\d+\))?\]\]")
# Inside of a macro, where the name of an instantiation is made of strings: "merge_" #N
_INSTANTIATION = re.compile(
    r"template \[\[host_name\((?P<name>.*?)\)\]\] kernel\s*(?:\\\s*)?decltype\((?P<of>.*?)\)[^;]*;"
)

# What a parameter with an attribute is in CUDA
_POSITIONS = {
    "thread_position_in_grid": "Position{grid_position(launch)}",
    "threads_per_grid": "Position{launch.threads}",
    "threadgroup_position_in_grid": "Position{group_position(launch)}",
    "thread_position_in_threadgroup": "Position{threadIdx}",
    "threads_per_threadgroup": "Position{make_uint3(blockDim.x, blockDim.y, blockDim.z)}",
    "thread_index_in_simdgroup": "thread_index() % 32",
    "simdgroup_index_in_threadgroup": "thread_index() / 32",
    "simdgroups_per_threadgroup": "(blockDim.x * blockDim.y * blockDim.z + 31) / 32",
}


class _EntryPoint(NamedTuple):
    """How the CUDA kernel for a Metal kernel is declared, and how it calls that; a template has several."""

    bounds: str
    parameters: str
    arguments: str

    def define(self, name: str, callee: str) -> str:
        """Return a CUDA kernel that calls a kernel of the source, such as merge<2>, in the threads of its grid."""
        head = f'extern "C" __global__ {self.bounds}void {name}({self.parameters}Launch launch)'
        return f"{head} {{ if (is_in_grid(launch)) {callee}({self.arguments}); }}"


def translate(source: str) -> str:
    """Return the CUDA C++ of a Metal source, whose lines keep their numbers; kernels keep their names.

    A kernel has the parameters of the Metal kernel's buffers, and a struct Launch. What is `constant` in Metal is
    passed by value.
    """
    source = _VARIABLE.sub(r"__shared__ \1 ", _COMMENT.sub("", source))
    entries: dict[str, _EntryPoint] = {}
    definitions: list[str] = []

    def translate_kernel(found: re.Match[str]) -> str:
        name, template = found["name"], found["template"] or ""
        entries[name] = entry = _make_entry_point(found["parameters"], found["limit"])
        if not template:
            definitions.append(entry.define(name, name))
        parameters = re.sub(r" \[\[.*?\]\]", "", found["parameters"]).replace("constant ", "const ")
        lines = "\n" * (found.group().count("\n") - template.count("\n") - parameters.count("\n"))
        return f"{template}{lines}__forceinline__ __device__ void {name}({parameters}) {{"

    def instantiate(found: re.Match[str]) -> str:
        callee = " ".join(found["of"].split())
        entry = entries[callee.partition("<")[0]]
        # "merge_" #N becomes merge_##N
        name = "##".join(part.strip('"#') for part in found["name"].split())
        return found.group().count("\n") * "\\\n" + entry.define(name, callee)

    source = _INSTANTIATION.sub(instantiate, _KERNEL.sub(translate_kernel, source))
    return "\n".join((source, *definitions, ""))


def _make_entry_point(parameters: str, limit: str | None) -> _EntryPoint:
    declared, arguments = "", []
    for found in _PARAMETER.finditer(" ".join(parameters.split())):
        type_, name, attribute = found["type"].strip(), found["name"], found["attribute"]
        if attribute != "buffer":
            arguments.append(_POSITIONS[attribute])
            continue
        arguments.append(name)
        if type_.startswith("constant "):
            by_value = type_.removeprefix("constant ")
            if by_value.endswith("*"):
                by_value = f"Inline<{by_value[:-1]}>"
                arguments[-1] += ".values"
            type_ = f"const __grid_constant__ {by_value.rstrip('&')}"
        declared += f"{type_} {name}, "
    return _EntryPoint(
        f"__launch_bounds__({limit}, {GROUPS_AT_ONCE}) " if limit else "", declared, ", ".join(arguments)
    )

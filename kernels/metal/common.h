// What all kernels share. Types are those a library is compiled for, written above its source by library.py: T of the
// activations, and others that a file names at its top. Arithmetic is in float, and rounded once at the end.
#pragma once

#include <metal_stdlib>
using namespace metal;

#define GROUP 256  // threads of a threadgroup, at most; a macro, as an attribute wants it

constant constexpr int LANES = 32;   // threads of a simdgroup
constant constexpr int SIMDGROUPS = GROUP / LANES;

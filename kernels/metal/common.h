// Definitions for all kernels. source.py writes typedefs above a source: T for activations, and others that the file
// names at its top. Arithmetic is in float, and rounded where the reference rounds: once, at the end, except for the
// gate of silu and the norm of Llama.
#pragma once

#include <metal_stdlib>
using namespace metal;

#define GROUP 256  // the most threads of a threadgroup; a macro, as an attribute needs it

constant constexpr int LANES = 32;   // threads of a simdgroup
constant constexpr int SIMDGROUPS = GROUP / LANES;

// Whether a number is finite, by its bits: with fast math the compiler assumes that all numbers are.
constant constexpr uint NO_NUMBER = 0x7FC00000u, EXPONENT = 0x7F800000u;
inline bool is_number(float x) { return (as_type<uint>(x) & EXPONENT) != EXPONENT; }

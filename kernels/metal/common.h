// Definitions for all kernels. source.py writes typedefs above a source: T, the type of activations, and other types
// that the file names at its top. Arithmetic is in float; results are rounded where the reference rounds: once, at the
// end, and also after the gate of silu and, as in Llama, before a norm's weight.
#pragma once

#include <metal_stdlib>
using namespace metal;

#define GROUP 256  // most threads of a threadgroup; a macro, as an attribute needs it

constant constexpr int LANES = 32;   // threads of a simdgroup
constant constexpr int SIMDGROUPS = GROUP / LANES;

// Returns whether a number is finite, from its bits: with fast math the compiler assumes that all numbers are.
constant constexpr uint NO_NUMBER = 0x7FC00000u, EXPONENT = 0x7F800000u;
inline bool is_number(float x) { return (as_type<uint>(x) & EXPONENT) != EXPONENT; }

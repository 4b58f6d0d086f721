// What all kernels share. Types are those a library is compiled for, written above its source by source.py: T of the
// activations, and others that a file names at its top. Arithmetic is in float, and rounded where the reference rounds:
// once, at the end, but for silu's gate and Llama's norm.
#pragma once

#include <metal_stdlib>
using namespace metal;

#define GROUP 256  // threads of a threadgroup, at most; a macro, as an attribute wants it

constant constexpr int LANES = 32;   // threads of a simdgroup
constant constexpr int SIMDGROUPS = GROUP / LANES;

// Neither NaN nor infinite, by its bits: a compiler that is to be fast takes all numbers for finite.
constant constexpr uint NO_NUMBER = 0x7FC00000u, EXPONENT = 0x7F800000u;
inline bool is_number(float x) { return (as_type<uint>(x) & EXPONENT) != EXPONENT; }

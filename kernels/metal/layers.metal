// RoPE, the gate of the feed-forward (silu), and repetition of KV heads.
#include "common.h"

// ---------------------------------------------------------------- rotary positions
struct RopeSizes {
  int heads, half_dim, x_token, x_head;  // x_token, x_head: strides of x in numbers
};

// Applies RoPE, one thread per pair of numbers: x [N, heads, 2 * half_dim] -> out; cos and sin are [P, half_dim].
kernel void rope(
    device T* out [[buffer(0)]],
    const device T* x [[buffer(1)]],
    const device float* cos_table [[buffer(2)]],
    const device float* sin_table [[buffer(3)]],
    const device long* positions [[buffer(4)]],
    constant RopeSizes& sizes [[buffer(5)]],
    uint3 at [[thread_position_in_grid]]) {  // pair, head, token
  const size_t turn = size_t(positions[at.z]) * sizes.half_dim + at.x;
  const float c = cos_table[turn], s = sin_table[turn];
  x += size_t(at.z) * sizes.x_token + size_t(at.y) * sizes.x_head + at.x;
  out += (size_t(at.z) * sizes.heads + at.y) * (2 * sizes.half_dim) + at.x;
  const float a = float(x[0]), b = float(x[sizes.half_dim]);
  out[0] = T(a * c - b * s);
  out[sizes.half_dim] = T(b * c + a * s);
}

// ---------------------------------------------------------------- feed-forward
struct GateSizes {
  int width, stride;  // numbers in a row of the output; numbers from row to row of the input
};

// Computes silu(first half) * second half, one thread per number of the output: gate_up [N, 2 * width] -> out [N,
// width].
kernel void silu_mul(
    device T* out [[buffer(0)]],
    const device T* gate_up [[buffer(1)]],
    constant GateSizes& sizes [[buffer(2)]],
    uint2 at [[thread_position_in_grid]]) {  // number, row
  gate_up += size_t(at.y) * sizes.stride + at.x;
  const float x = float(gate_up[0]);
  const T gate = T(x / (1.0f + exp(-x)));  // rounded, as torch does
  out[size_t(at.y) * sizes.width + at.x] = T(float(gate) * float(gate_up[sizes.width]));
}

// ---------------------------------------------------------------- repeated heads
struct RepeatSizes {
  int groups, x_token, x_head, out_head, out_token;  // strides in numbers
};

// Repeats KV heads, one thread per number of the output: x [S, H, D] -> out [H * groups, S, D], which is a new tensor
// or some columns of a larger one (a mirror).
kernel void repeat_kv_heads(
    device T* out [[buffer(0)]],
    const device T* x [[buffer(1)]],
    constant RepeatSizes& sizes [[buffer(2)]],
    uint3 at [[thread_position_in_grid]]) {  // number, token, repeated head
  out[size_t(at.z) * sizes.out_head + size_t(at.y) * sizes.out_token + at.x] =
      x[size_t(at.y) * sizes.x_token + size_t(at.z / uint(sizes.groups)) * sizes.x_head + at.x];
}

// RoPE, the gate of the feed-forward, and repeated KV heads.
#include "common.h"

// ---------------------------------------------------------------- rotary positions
struct RopeSizes {
  int heads, half_dim, x_token, x_head;  // strides of x in numbers
};

// One thread per pair: x [N, heads, 2 * half_dim] -> out, cos and sin [P, half_dim].
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
  int width, stride;  // of the output; from row to row of the input
};

// One thread per number: gate_up [N, 2 * width] -> out [N, width].
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

// One thread per number: x [S, H, D] -> out [H * groups, S, D], a new tensor or columns of a mirror.
kernel void repeat_kv_heads(
    device T* out [[buffer(0)]],
    const device T* x [[buffer(1)]],
    constant RepeatSizes& sizes [[buffer(2)]],
    uint3 at [[thread_position_in_grid]]) {  // number, token, repeated head
  out[size_t(at.z) * sizes.out_head + size_t(at.y) * sizes.out_token + at.x] =
      x[size_t(at.y) * sizes.x_token + size_t(at.z / uint(sizes.groups)) * sizes.x_head + at.x];
}

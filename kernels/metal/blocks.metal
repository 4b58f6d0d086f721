// Multiplies few rows of x by a weight in a block format of GGUF files (`kernels.weights.block_formats.BlockTensor`),
// as its bytes are in the file, like linear.metal. A format is a row of the table at the end.
#include "linear.h"

constant constexpr int STEP = 8;  // columns that a lane takes in one step; all have the same scale

// The lower or the higher bits of the numbers of a block, as `BitField` in block_formats.py says.
template <int START, int RUN, int BITS>
struct Field {
  static constant constexpr int WIDTH = BITS;

  static inline uint get(const device uchar* block, int column) {
    constexpr int COLUMNS = RUN * (8 / BITS);  // of a run of bytes
    const int place = column % COLUMNS;
    const uint bits = block[START + column / COLUMNS * RUN + place % RUN];
    return (bits >> (place / RUN * BITS)) & ((1u << BITS) - 1u);
  }
};

struct NoField {
  static inline uint get(const device uchar*, int) { return 0; }
};

inline float read_half(const device uchar* from) { return float(as_type<half>(ushort(from[0] | from[1] << 8))); }

// ---------------------------------------------------------------- values of numbers
template <int ZERO>
struct Integer {
  static inline float get(uint number) { return float(int(number) - ZERO); }
};

struct Signed {
  static inline float get(uint number) { return float(int(number ^ 128u) - 128); }
};

constant constexpr int BOOK[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
struct Book {
  static inline float get(uint number) { return float(BOOK[number]); }
};

constant constexpr int FLOATS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice E2M1
struct Float4 {
  static inline float get(uint number) { return float(FLOATS[number]); }
};

// ---------------------------------------------------------------- scale and offset of a column's group
struct OneScale {
  static inline float2 get(const device uchar* block, int) { return float2(read_half(block), 0.0f); }
};

struct ScaleAndOffset {
  static inline float2 get(const device uchar* block, int) { return float2(read_half(block), read_half(block + 2)); }
};

struct Exponent {
  static inline float2 get(const device uchar* block, int) {
    const uint exponent = block[0];
    return float2(as_type<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23), 0.0f);
  }
};

struct ScalesOfQ2K {
  static inline float2 get(const device uchar* block, int column) {
    const uint both = block[column / 16];
    return float2(read_half(block + 80) * float(both & 15u), -(read_half(block + 82) * float(both >> 4)));
  }
};

struct ScalesOfQ3K {
  static inline float2 get(const device uchar* block, int column) {
    const uint scale = Field<96, 8, 4>::get(block, column / 16) | Field<104, 4, 2>::get(block, column / 16) << 4;
    return float2(read_half(block + 108) * float(int(scale) - 32), 0.0f);
  }
};

struct ScalesOfQ4K {  // of 6 bits; those of the later four groups have their high bits above the others
  static inline float2 get(const device uchar* block, int column) {
    const int group = column / 32, first = group % 4;
    const uint low = block[4 + first], next = block[8 + first], both = block[12 + first];
    const uint scale = group < 4 ? low & 63u : (both & 15u) | (low >> 2 & 48u);
    const uint offset = group < 4 ? next & 63u : both >> 4 | (next >> 2 & 48u);
    return float2(read_half(block) * float(scale), -(read_half(block + 2) * float(offset)));
  }
};

struct ScalesOfQ6K {
  static inline float2 get(const device uchar* block, int column) {
    return float2(read_half(block + 208) * Signed::get(block[192 + column / 16]), 0.0f);
  }
};

struct ScalesOfIQ4XS {
  static inline float2 get(const device uchar* block, int column) {
    const uint scale = Field<4, 1, 4>::get(block, column / 32) | Field<2, 1, 2>::get(block, column / 32) << 4;
    return float2(read_half(block) * float(int(scale) - 32), 0.0f);
  }
};

// ---------------------------------------------------------------- formats
template <int BLOCK_COLUMNS, int BLOCK_BYTES, typename Low, typename High, typename Value, typename Scales>
struct Format {
  // Unpacks STEP numbers of a row from `column` on, and returns their scale and offset.
  static inline float2 unpack(thread float* to, const device uchar* row, int column) {
    const device uchar* block = row + column / BLOCK_COLUMNS * BLOCK_BYTES;
    const int first = column % BLOCK_COLUMNS;
    for (int s = 0; s < STEP; s++)
      to[s] = Value::get(Low::get(block, first + s) | High::get(block, first + s) << Low::WIDTH % 32);
    return Scales::get(block, first);
  }
};

// One simdgroup computes OUTPUTS outputs of ROWS rows. Arguments: x [rows, inputs], blocks [outputs, bytes of a row],
// bias [outputs]. An offset is multiplied by the sum of the inputs, not by each of them.
template <typename Blocks, int ROWS>
[[max_total_threads_per_threadgroup(GROUP)]] kernel void block_linear(
    device T* out [[buffer(0)]],
    const device T* x [[buffer(1)]],
    const device uchar* blocks [[buffer(2)]],
    const device T* bias [[buffer(3)]],
    constant LinearSizes& linear_sizes [[buffer(4)]],
    uint2 group_at [[threadgroup_position_in_grid]],  // outputs, rows
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const LinearSizes sizes = linear_sizes;
  const int output = (group_at.x * SIMDGROUPS + simdgroup) * OUTPUTS, row = group_at.y * ROWS;
  if (output >= sizes.outputs) return;
  Product<ROWS> product;
  for (int i = lane * STEP; i < sizes.inputs; i += LANES * STEP) {
    float xs[ROWS][STEP], totals[ROWS] = {0.0f};
    for (int r = 0; r < ROWS; r++) {
      const device T* from = row_at(x, row + r, sizes) + i;
      for (int s = 0; s < STEP; s++) {
        xs[r][s] = float(from[s]);
        totals[r] += xs[r][s];
      }
    }
    for (int o = 0; o < OUTPUTS; o++) {
      const size_t weight_row = min(output + o, sizes.outputs - 1);
      float weights[STEP];
      const float2 scales = Blocks::unpack(weights, blocks + weight_row * sizes.weight_stride, i);
      for (int r = 0; r < ROWS; r++) {
        float sum = 0.0f;
        for (int s = 0; s < STEP; s++) sum += xs[r][s] * weights[s];
        product.sums[r][o] += scales.x * sum + scales.y * totals[r];
      }
    }
  }
  product.finish(out, bias, row, output, sizes, lane);
}

struct BlockSizes {
  int inputs, weight_stride;  // numbers per row, and bytes from row to row of the weight
};

// Dequantizes a weight to out [outputs, inputs], for torch to multiply; each thread dequantizes STEP numbers.
template <typename Blocks>
kernel void dequantize_blocks(
    device T* out [[buffer(0)]],
    const device uchar* blocks [[buffer(1)]],
    constant BlockSizes& sizes [[buffer(2)]],
    uint2 at [[thread_position_in_grid]]) {  // steps, output
  const int i = at.x * STEP;
  float weights[STEP];
  const float2 scales = Blocks::unpack(weights, blocks + size_t(at.y) * sizes.weight_stride, i);
  for (int s = 0; s < STEP; s++)
    out[size_t(at.y) * sizes.inputs + i + s] = T(scales.x * weights[s] + scales.y);
}

#define LINEAR(NAME, ROWS)                                  \
  template [[host_name("linear_" #NAME "_" #ROWS)]] kernel \
      decltype(block_linear<NAME, ROWS>) block_linear<NAME, ROWS>;
#define FORMAT(NAME, ...)                                                                                         \
  using NAME = Format<__VA_ARGS__>;                                                                                \
  LINEAR(NAME, 1) LINEAR(NAME, 2) LINEAR(NAME, 4)                                                                  \
  template [[host_name("dequantize_" #NAME)]] kernel decltype(dequantize_blocks<NAME>) dequantize_blocks<NAME>;

FORMAT(Q4_0, 32, 18, Field<2, 16, 4>, NoField, Integer<8>, OneScale)
FORMAT(Q4_1, 32, 20, Field<4, 16, 4>, NoField, Integer<0>, ScaleAndOffset)
FORMAT(Q5_0, 32, 22, Field<6, 16, 4>, Field<2, 1, 1>, Integer<16>, OneScale)
FORMAT(Q5_1, 32, 24, Field<8, 16, 4>, Field<4, 1, 1>, Integer<0>, ScaleAndOffset)
FORMAT(Q8_0, 32, 34, Field<2, 32, 8>, NoField, Signed, OneScale)
FORMAT(IQ4_NL, 32, 18, Field<2, 16, 4>, NoField, Book, OneScale)
FORMAT(MXFP4, 32, 17, Field<1, 16, 4>, NoField, Float4, Exponent)
FORMAT(Q2_K, 256, 84, Field<16, 32, 2>, NoField, Integer<0>, ScalesOfQ2K)
FORMAT(Q3_K, 256, 110, Field<32, 32, 2>, Field<0, 32, 1>, Integer<4>, ScalesOfQ3K)
FORMAT(Q4_K, 256, 144, Field<16, 32, 4>, NoField, Integer<0>, ScalesOfQ4K)
FORMAT(Q5_K, 256, 176, Field<48, 32, 4>, Field<16, 32, 1>, Integer<0>, ScalesOfQ4K)
FORMAT(Q6_K, 256, 210, Field<0, 64, 4>, Field<128, 32, 2>, Integer<32>, ScalesOfQ6K)
FORMAT(IQ4_XS, 256, 136, Field<8, 16, 4>, NoField, Book, ScalesOfIQ4XS)

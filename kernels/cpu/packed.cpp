// Packs weights, and reads rows of packed weights, for torch. Knows no products.
#include "packed.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dispatch.h"
#include "ops.h"
#include "vector.h"

namespace kvmux {

using at::Tensor;

namespace {

template <typename T>
int64_t packed_size(int64_t outputs, int64_t k) {
  return blocks_of(outputs) * PANELS * Packing<T>::tiles(k) * Packing<T>::TILE;
}

}  // namespace

int64_t packed_numbers(int64_t outputs, int64_t k, at::ScalarType type) {
  if (type == at::kByte) return packed_size<uint8_t>(outputs, k);
  int64_t size = 0;
  with_type(type, [&](auto of_weight) { size = packed_size<decltype(of_weight)>(outputs, k); });
  return size;
}

namespace {

// Calls work(memory, first, count) for every block: its memory, its first output and number of outputs. Zeroes the
// block first if these outputs do not fill it.
template <typename Work>
void parallel_over_blocks(const Tensor& packed, int64_t outputs, bool filled, const Work& work) {
  const int64_t blocks = blocks_of(outputs), size = packed.nbytes() / std::max<int64_t>(1, blocks);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      auto* to = static_cast<char*>(packed.data_ptr()) + block * size;
      const int64_t first = block * BLOCK, count = std::min(outputs - first, BLOCK);
      if (!filled || count < BLOCK) std::memset(to, 0, size);
      work(to, first, count);
    }
  });
}

template <typename T>
bool fills_tiles(int64_t k) {
  return k % Packing<T>::DEPTH == 0;
}

void pack(const Tensor& packed, const Tensor& weight) {
  expect("linear", "weight", weight, FLOATS, {SOME, SOME});
  TORCH_CHECK(packed.dtype() == weight.dtype(), "the packed weight is of another type");
  const int64_t outputs = weight.size(0), k = weight.size(1), apart = weight.stride(0);
  TORCH_CHECK(packed.numel() == packed_numbers(outputs, k, weight.scalar_type()),
              "the tensor for the packed weight has another size");
  with_type(weight.scalar_type(), [&](auto of_weight) {
    using T = decltype(of_weight);
    const T* from = weight.const_data_ptr<T>();
    parallel_over_blocks(packed, outputs, fills_tiles<T>(k), [&](char* block, int64_t first, int64_t count) {
      pack_block(from + first * apart, apart, count, k, reinterpret_cast<T*>(block));
    });
  });
}

// Packs the numbers of a `kernels.quantization.QuantizedTensor`, which have 4 or 8 bits, of a weight with or without
// offsets.
void pack_integers(const Tensor& packed, const Tensor& numbers, int64_t bits, bool offsets) {
  expect("linear", "numbers", numbers, only(at::kByte), {SOME, SOME});
  TORCH_CHECK_VALUE(bits == 4 || bits == 8, "linear: a weight of ", bits, " bits a number");
  const int64_t outputs = numbers.size(0), k = numbers.size(1) * 8 / bits;
  TORCH_CHECK(packed.numel() == packed_size<uint8_t>(outputs, k) * bits / 8,
              "the tensor for the packed weight has another size");
  const uint8_t* from = numbers.const_data_ptr<uint8_t>();
  const int64_t apart = numbers.stride(0);
  parallel_over_blocks(packed, outputs, bits == 8 && fills_tiles<uint8_t>(k),
                       [&](char* block, int64_t first, int64_t count) {
                         auto* const to = reinterpret_cast<uint8_t*>(block);
                         if (bits == 8) return pack_block(from + first * apart, apart, count, k, to);
                         for (int64_t i = 0; i < count; ++i) pack_halves(from + (first + i) * apart, k, i, to);
                       });
  if (bits == 8 && !offsets) packed.bitwise_xor_(128);
}

// ---------------------------------------------------------------- rows
// Reads the rows `which` of a packed weight of floats.
template <typename T>
void unpack_float_rows(const PackedWeight& weight, const int64_t* which, int64_t count, T* to) {
  using P = Packing<T>;
  const T* numbers = weight.numbers.const_data_ptr<T>();
  parallel_over_rows(count, weight.width, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const T* from = numbers + P::panel(which[n] / PANEL, weight.width) + which[n] % PANEL * P::S;
      for (int64_t i = 0; i < weight.width; i += P::S)
        for (int64_t s = 0; s < std::min(P::S, weight.width - i); ++s)
          to[n * weight.width + i + s] = from[P::column(i) + s];
    }
  });
}

// Reads the rows `which` of a packed weight of integers, dequantized to float32.
template <typename S>
void unpack_integer_rows(const PackedWeight& weight, const int64_t* which, int64_t count, float* to) {
  using P = Packing<uint8_t>;
  const auto* numbers = weight.numbers.const_data_ptr<uint8_t>();
  const S* scales = weight.scale.const_data_ptr<S>();
  const S* offsets = weight.offset.defined() ? weight.offset.const_data_ptr<S>() : nullptr;
  const int64_t groups = weight.width / weight.group;
  const float zero = weight.bits == 4 ? 8.f : 128.f;
  const auto number = [&](int64_t row, int64_t i) {
    const int64_t panel = P::panel(row / PANEL, weight.width), lane = row % PANEL * P::S;
    if (weight.bits == 8) {
      const uint8_t byte = numbers[panel + lane + P::column(i) + i % P::S];
      return static_cast<float>(offsets == nullptr ? byte ^ 128 : byte);
    }
    const uint8_t byte = numbers[panel / 2 + lane + halves_column(i) + i % P::S];
    return static_cast<float>(i / P::S % 2 == 0 ? byte & 15 : byte >> 4);
  };
  parallel_over_rows(count, weight.width, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t i = 0; i < weight.width; ++i) {
        const int64_t at = (which[n] / PANEL * groups + i / weight.group) * PANEL + which[n] % PANEL;
        const float scale = static_cast<float>(scales[at]);
        const float offset = offsets == nullptr ? -scale * zero : static_cast<float>(offsets[at]);
        to[n * weight.width + i] = number(which[n], i) * scale + offset;
      }
  });
}

Tensor packed_rows(at::TensorList parts, at::IntArrayRef format, const Tensor& which) {
  const PackedWeight weight(parts, format);
  expect("rows", "which", which, only(at::kLong), {ANY});
  expect_indices("rows", "which", which, weight.outputs);
  const int64_t* rows = which.const_data_ptr<int64_t>();
  const int64_t count = which.numel();
  if (weight.bits == 0) {
    const Tensor found = at::empty({count, weight.width}, weight.numbers.options());
    with_type(weight.numbers.scalar_type(),
              [&](auto of_weight) { unpack_float_rows(weight, rows, count, found.data_ptr<decltype(of_weight)>()); });
    return found;
  }
  const Tensor found = at::empty({count, weight.width}, at::kFloat);
  with_type(weight.scale.scalar_type(), [&](auto of_scale) {
    unpack_integer_rows<decltype(of_scale)>(weight, rows, count, found.data_ptr<float>());
  });
  return found;
}

}  // namespace

PackedWeight::PackedWeight(at::TensorList parts, at::IntArrayRef format)
    : numbers(parts[0]), scale(parts.size() > 1 ? parts[1] : Tensor()), offset(parts.size() > 2 ? parts[2] : Tensor()),
      outputs(format[0]), width(format[1]), bits(format[2]), group(format[3]) {
  const auto type = bits == 0 ? numbers.scalar_type() : at::kByte;
  const int64_t size = packed_numbers(outputs, width, type);
  expect("linear", "weight, packed,", numbers, only(type), {bits == 4 ? size / 2 : size});
  if (bits == 0) return;
  const int64_t groups = group > 0 ? width / group : 0;
  TORCH_CHECK_VALUE(groups * group == width && (groups == 1 || group % 32 == 0), "linear: no kernel for ", "groups of ",
                    group, " of ", width, " columns");
  // Limit for the columns of a group: more products of 8-bit numbers would overflow a sum of 32 bits.
  constexpr int64_t WIDEST = (int64_t{1} << 31) / (127 * 256);
  TORCH_CHECK_VALUE(group <= WIDEST, "linear: groups of ", group, " columns are more than ", WIDEST);
  const int64_t panels = blocks_of(outputs) * PANELS;
  expect("linear", "scale, packed,", scale, FLOATS, {panels, groups, PANEL});
  if (offset.defined()) expect("linear", "offset, packed,", offset, only(scale.scalar_type()), {panels, groups, PANEL});
}

}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("packed_numbers(int outputs, int width, ScalarType type) -> int", &kvmux::packed_numbers);
  library.def("pack(Tensor(a!) packed, Tensor weight) -> ()", &kvmux::pack);
  library.def("pack_integers(Tensor(a!) packed, Tensor numbers, int bits, bool offsets) -> ()", &kvmux::pack_integers);
  library.def("packed_rows(Tensor[] parts, int[] format, Tensor which) -> Tensor", &kvmux::packed_rows);
}

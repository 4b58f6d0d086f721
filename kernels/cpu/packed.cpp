// Packs weights, and reads rows of packed weights, for torch. Knows no products.
#include "packed.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dispatch.h"
#include "ops.h"
#include "vector.h"
#include "with_int_format.h"

namespace kvmux {

using at::Tensor;

namespace {

// The numbers of a part's layout, as kernels/cpu/packed.py has them.
enum Layout : size_t { ROWS, WIDTH, BITS, GROUP, BOOK, LEVELS, TENSORS, LAYOUT };

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

// Packs the numbers of a `kernels.weights.quantization.QuantizedTensor`, which have 4 or 8 bits.
void pack_integers(const Tensor& packed, const Tensor& numbers, int64_t bits) {
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
}

// Unpacks a block. It is copied first, so that the compiler knows that its bytes are apart from what is written.
template <typename B>
[[gnu::flatten]] void unpack_block(const uint8_t* from, Block& to) {
  uint8_t bytes[B::BYTES];
  Block block;
  std::memcpy(bytes, from, sizeof(bytes));
  B::unpack(bytes, block);
  if constexpr (B::BITS == 8)
    for (int i = 0; i < B::COLUMNS; ++i) block.numbers[i] ^= 128;  // stored as signed bytes
  to = block;
}

template <typename B>
void pack_rows_of_blocks(const PackedPart& weight, const Tensor& rows) {
  using F = FormatOf<B>;
  using S = typename F::Scale;
  const int64_t count = weight.width / B::COLUMNS, apart = rows.stride(0);
  TORCH_CHECK_VALUE(count * B::BYTES == rows.size(1), "linear: rows of ", rows.size(1), " bytes in blocks of ",
                    B::BYTES);
  const IntWeight<F> to = as_int_weight<F>(weight);
  const auto writable = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
  auto* const numbers = static_cast<uint8_t*>(writable(weight.numbers));
  auto *const scale = static_cast<S*>(writable(weight.scale)), *const offset = static_cast<S*>(writable(weight.offset));
  auto *const small = static_cast<int8_t*>(writable(weight.small)), *const small_offset = static_cast<int8_t*>(
                                                                        writable(weight.small_offset));
  const uint8_t* const from = rows.const_data_ptr<uint8_t>();
  const bool filled = fills_tiles<uint8_t>(weight.width);
  parallel_over_blocks(weight.numbers, weight.outputs, filled, [&](char*, int64_t first, int64_t outputs) {
    Block block;
    // A panel's outputs are packed block by block, so that what is written stays in the L1 cache.
    for (int64_t begin = first; begin < first + outputs; begin += PANEL)
      for (int64_t i = 0; i < count; ++i)
        for (int64_t row = begin; row < std::min(first + outputs, begin + PANEL); ++row) {
          const int64_t panel = row / PANEL, lane = row % PANEL, column = i * B::COLUMNS, unit = column / UNIT;
          unpack_block<B>(from + row * apart + i * B::BYTES, block);
          for (int64_t n = 0; n < B::COLUMNS; n += UNIT)
            pack_unit<B::BITS>(block.numbers + n, lane,
                               numbers + unit_offset<B::BITS>(panel, weight.width, column + n));
          const int64_t at = to.place(panel, unit) + lane;
          scale[at] = static_cast<S>(block.scale);
          if constexpr (B::OFFSETS) offset[at] = static_cast<S>(-block.offset);
          if constexpr (B::TWO_LEVELS)
            for (int64_t j = 0; j < B::COLUMNS / B::GROUP; ++j) {
              const int64_t place = to.small_place(panel, unit, j) + lane;
              small[place] = block.small[j];
              if constexpr (B::OFFSETS) small_offset[place] = static_cast<int8_t>(block.small_offset[j]);
            }
        }
  });
}

// Packs rows of blocks of a GGUF file into the tensors of a `PackedPart`.
void pack_blocks(at::TensorList tensors, at::IntArrayRef layout, const Tensor& rows, const std::string& name) {
  const PackedPart weight(tensors, layout);
  expect("linear", "blocks", rows, only(at::kByte), {weight.outputs, SOME});
  const bool known = with_block_format(name.c_str(), [&](auto of_blocks) {
    using B = decltype(of_blocks);
    with_int_format(weight, [&](auto of_weight) {
      if constexpr (std::is_same_v<decltype(of_weight), FormatOf<B>>)
        pack_rows_of_blocks<B>(weight, rows);
      else
        TORCH_CHECK_VALUE(false, "linear: blocks of ", name, " do not fit a weight of ", weight.bits, " bits");
    });
  });
  TORCH_CHECK_VALUE(known, "linear: no kernel for blocks of ", name);
}

// ---------------------------------------------------------------- rows
// Reads the rows `which` of a packed weight of floats.
template <typename T>
void unpack_float_rows(const PackedPart& weight, const int64_t* which, int64_t count, T* to) {
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
template <typename F>
void unpack_integer_rows(const IntWeight<F>& weight, int64_t width, const int64_t* which, int64_t count, float* to) {
  parallel_over_rows(count, width, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t panel = which[n] / PANEL, lane = which[n] % PANEL;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t unit = i / UNIT, at = weight.place(panel, unit) + lane;
        int number = number_at<F::BITS>(weight.numbers + unit_offset<F::BITS>(panel, width, i), lane, i % UNIT);
        if constexpr (F::BOOK != NONE) number = CODEBOOKS[F::BOOK][number];
        if constexpr (F::BITS == 8) number ^= F::ZERO;  // stored as a signed byte
        if constexpr (F::BOOK == NONE) number -= F::ZERO;
        float scale = static_cast<float>(weight.scale[at]);
        float offset = F::OFFSETS ? static_cast<float>(weight.offset[at]) : 0.f;
        if constexpr (F::TWO_LEVELS) {
          const int64_t place = weight.small_place(panel, unit, i % UNIT * F::PARTS / UNIT) + lane;
          scale *= weight.small[place];
          if constexpr (F::OFFSETS) offset *= weight.small_offset[place];
        }
        to[n * width + i] = F::OFFSETS ? number * scale + offset : number * scale;
      }
    }
  });
}

// Returns the rows `which` of a part; those of a weight of integers are dequantized to float32.
Tensor packed_rows(at::TensorList tensors, at::IntArrayRef layout, const Tensor& which) {
  const PackedPart weight(tensors, layout);
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
  with_int_format(weight, [&](auto format) {
    unpack_integer_rows(as_int_weight<decltype(format)>(weight), weight.width, rows, count, found.data_ptr<float>());
  });
  return found;
}

}  // namespace

PackedPart::PackedPart(at::TensorList tensors, at::IntArrayRef layout)
    : outputs(layout[ROWS]), width(layout[WIDTH]), bits(layout[BITS]), group(layout[GROUP]), book(layout[BOOK]) {
  const bool two_levels = layout[LEVELS] == 2;
  const auto tensor = [&](size_t i) { return tensors.size() > i ? tensors[i] : Tensor(); };
  numbers = tensor(0), scale = tensor(1);
  if (two_levels)
    small = tensor(2), offset = tensor(3), small_offset = tensor(4);
  else
    offset = tensor(2);
  const auto type = bits == 0 ? numbers.scalar_type() : at::kByte;
  const int64_t size = packed_numbers(outputs, width, type);
  expect("linear", "weight, packed,", numbers, only(type), {bits == 0 ? size : size * bits / 8});
  if (bits == 0) return;
  const int64_t groups = group > 0 ? width / group : 0;
  constexpr int64_t SMALLEST = 32, SMALLEST_OF_TWO_LEVELS = 16, BLOCK_COLUMNS = 256;
  const int64_t multiple = two_levels ? SMALLEST_OF_TWO_LEVELS : SMALLEST;
  TORCH_CHECK_VALUE(groups * group == width && (groups == 1 || group % multiple == 0), "linear: no kernel for ",
                    "groups of ", group, " of ", width, " columns");
  TORCH_CHECK_VALUE(!two_levels || width % BLOCK_COLUMNS == 0, "linear: two levels of scales of ", width, " columns");
  // Limit for the columns of a group: more products of 8-bit numbers would overflow a sum of 32 bits.
  constexpr int64_t WIDEST = (int64_t{1} << 31) / (127 * 256);
  TORCH_CHECK_VALUE(group <= WIDEST, "linear: groups of ", group, " columns are more than ", WIDEST);
  const int64_t panels = blocks_of(outputs) * PANELS, scales = two_levels ? width / BLOCK_COLUMNS : groups;
  expect("linear", "scale, packed,", scale, FLOATS, {panels, scales, PANEL});
  if (offset.defined()) expect("linear", "offset, packed,", offset, only(scale.scalar_type()), {panels, scales, PANEL});
  if (small.defined()) expect("linear", "small scale, packed,", small, only(at::kChar), {panels, groups, PANEL});
  if (small_offset.defined())
    expect("linear", "small offset, packed,", small_offset, only(at::kChar), {panels, groups, PANEL});
  with_int_format(*this, [&](auto format_of_weight) {
    using F = decltype(format_of_weight);
    TORCH_CHECK_VALUE(scale.scalar_type() == c10::CppTypeToScalarType<typename F::Scale>::value &&
                          F::TWO_LEVELS == small.defined() && (F::TWO_LEVELS && F::OFFSETS) == small_offset.defined() &&
                          (!F::TWO_LEVELS || group == UNIT / F::PARTS),
                      "linear: the parts of a weight of ", bits, " bits do not fit each other");
  });
}

PackedWeight::PackedWeight(at::TensorList tensors, at::IntArrayRef layouts) : outputs(0), width(layouts[WIDTH]) {
  for (; !layouts.empty(); layouts = layouts.slice(LAYOUT)) {
    TORCH_CHECK_VALUE(outputs % BLOCK == 0, "linear: a part of a weight begins at output ", outputs);
    const auto count = static_cast<size_t>(layouts[TENSORS]);
    parts.emplace_back(tensors.slice(0, count), layouts.slice(0, LAYOUT));
    TORCH_CHECK_VALUE(
        parts.back().width == width && (parts.size() == 1 || (parts[0].bits > 0 && parts.back().bits > 0)),
        "linear: the parts of a weight do not fit each other");
    outputs += parts.back().outputs;
    tensors = tensors.slice(count);
  }
}

}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("packed_numbers(int outputs, int width, ScalarType type) -> int", &kvmux::packed_numbers);
  library.def("pack(Tensor(a!) packed, Tensor weight) -> ()", &kvmux::pack);
  library.def("pack_integers(Tensor(a!) packed, Tensor numbers, int bits) -> ()", &kvmux::pack_integers);
  library.def("pack_blocks(Tensor(a!)[] tensors, int[] layout, Tensor rows, str format) -> ()", &kvmux::pack_blocks);
  library.def("packed_rows(Tensor[] tensors, int[] layout, Tensor which) -> Tensor", &kvmux::packed_rows);
}

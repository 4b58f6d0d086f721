// Dispatch of templates by the format of a packed weight of integers. Knows no product.
#pragma once

#include "dispatch.h"
#include "int_formats.h"
#include "ops.h"

namespace kvmux {

// Calls work(format) with a value of the weight's `IntFormat`.
template <typename Work>
void with_int_format(const PackedPart& weight, const Work& work) {
  const bool offsets = weight.offset.defined();
  const auto is = [&](int64_t bits, bool has_offsets, Codebook book = NONE) {
    return weight.bits == bits && offsets == has_offsets && weight.book == book;
  };
  if (weight.small.defined()) {
    if (is(2, true)) return work(FormatOf<Q2_K>{});
    if (is(3, false)) return work(FormatOf<Q3_K>{});
    if (is(4, true)) return work(FormatOf<Q4_K>{});
    if (is(4, false, IQ4)) return work(FormatOf<IQ4_XS>{});
    if (is(5, true)) return work(FormatOf<Q5_K>{});
    if (is(6, false)) return work(FormatOf<Q6_K>{});
  } else if (weight.book != NONE || weight.bits == 5) {
    if (is(4, false, IQ4)) return work(FormatOf<IQ4_NL>{});
    if (is(4, false, FP4)) return work(FormatOf<MXFP4>{});
    if (is(5, false)) return work(FormatOf<Q5_0>{});
    if (is(5, true)) return work(FormatOf<Q5_1>{});
  } else {
    return with_type(weight.scale.scalar_type(), [&](auto of_scale) {
      using S = decltype(of_scale);
      if (is(4, false)) return work(IntFormat<4, 8, false, S>{});
      if (is(4, true)) return work(IntFormat<4, 0, true, S>{});
      if (is(8, false)) return work(IntFormat<8, 128, false, S>{});
      if (is(8, true)) return work(IntFormat<8, 0, true, S>{});
      TORCH_CHECK_VALUE(false, "linear: no kernel for weights of ", weight.bits, " bits");
    });
  }
  TORCH_CHECK_VALUE(false, "linear: no kernel for weights of ", weight.bits, " bits");
}

// Returns a packed weight as its products read it.
template <typename F>
IntWeight<F> as_int_weight(const PackedPart& weight) {
  using S = typename F::Scale;
  const auto small = [](const at::Tensor& t) { return t.defined() ? t.const_data_ptr<int8_t>() : nullptr; };
  return {weight.numbers.const_data_ptr<uint8_t>(),
          weight.scale.const_data_ptr<S>(),
          F::OFFSETS ? weight.offset.const_data_ptr<S>() : nullptr,
          small(weight.small),
          small(weight.small_offset),
          (weight.width + UNIT - 1) / UNIT,
          (weight.group + UNIT - 1) / UNIT};
}

}  // namespace kvmux

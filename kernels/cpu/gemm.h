// The product of rows of x and a packed weight in any format; made once for a weight and a type of x. Rows of x are
// packed first (`pack_row`), then multiplied by all threads (`multiply`); an epilogue takes the sums. Knows neither
// where the rows come from nor what the epilogue does with the sums.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <memory>

#include "ops.h"
#include "packed.h"
#include "thread_team.h"

namespace kvmux {

// A function that takes the sums of panels first .. last - 1, [height][PANEL] for each; two successive panels begin
// `size` numbers from each other. If the product has twin panels, their sums follow.
using Epilogue = c10::function_ref<void(int64_t first, int64_t last, const float* sums, int64_t size)>;

class Gemm {
 public:
  static constexpr int64_t PART = PAIR * PANEL;

  explicit Gemm(const PackedWeight& weight) : outputs(weight.outputs), width(weight.width), weight_(weight) {}
  virtual ~Gemm() = default;

  const int64_t outputs, width;

  virtual int64_t input_bytes(int64_t rows) const = 0;  // bytes of `rows` packed rows of x
  virtual int64_t sums_size(int64_t rows) const = 0;    // number of float32 sums for which each thread needs memory

  // Packs a row of x, number `row` of `rows`, into `input`.
  virtual void pack_row(char* input, int64_t rows, const void* x, int64_t row) const = 0;

  // Packs PART columns of rows first .. last - 1, given as x [last - first, PART]; the number of the first column is a
  // multiple of PART. May be called only if packs_columns() is true.
  virtual bool packs_columns() const { return false; }
  virtual void pack_columns(char*, int64_t, const void*, int64_t, int64_t, int64_t) const {
    TORCH_INTERNAL_ASSERT(false, "this weight packs whole rows of x");
  }

  // Multiplies packed rows by all panels of the weight, in one phase of the team. If twin > 0, panels 0 .. twin - 1 are
  // each computed together with their twin, the panel `twin` further on (gate and up projection).
  virtual void multiply(Team& team, Member member, char* input, int64_t rows, float* sums, int64_t twin,
                        const Epilogue& epilogue) const = 0;

 private:
  const PackedWeight weight_;  // keeps its memory alive
};

std::unique_ptr<Gemm> make_gemm(const PackedWeight& weight, at::ScalarType x_type);

}  // namespace kvmux

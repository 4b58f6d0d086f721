// The product of rows of x and a packed weight in any format; made once for a weight and a type of x. Rows of x are
// packed first (`pack`), then multiplied by all threads (`multiply`); an epilogue takes the sums. Knows neither where
// the rows come from nor what the epilogue does with the sums.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <vector>

#include "ops.h"
#include "packed.h"
#include "thread_team.h"

namespace kvmux {

// A function that takes the sums of panels first .. last - 1, [height][PANEL] for each; two successive panels begin
// `size` numbers from each other. If the product has twin panels, their sums follow.
using Epilogue = c10::function_ref<void(int64_t first, int64_t last, const float* sums, int64_t size)>;

// A product with rows that have been packed, as one thread computes it.
class PanelProduct {
 public:
  virtual ~PanelProduct() = default;

  // Computes the sums [panels][height][PANEL] of panels begin .. end - 1, for all rows.
  virtual void compute(int64_t begin, int64_t end, float* sums) = 0;
};

class Gemm {
 public:
  static constexpr int64_t PART = PAIR * PANEL;

  Gemm(int64_t outputs, int64_t width) : outputs(outputs), width(width) {}
  virtual ~Gemm() = default;

  const int64_t outputs, width;

  virtual int64_t input_bytes(int64_t rows) const = 0;  // bytes of `rows` packed rows of x

  // Packs columns first .. first + count - 1 of a row of x, number `row` of `rows`, into `input`. `first` is a multiple
  // of PART, and so is `count` but for the last columns.
  virtual void pack(char* input, int64_t rows, const void* x, int64_t row, int64_t first, int64_t count) const = 0;
  void pack_row(char* input, int64_t rows, const void* x, int64_t row) const { pack(input, rows, x, row, 0, width); }

  // Multiplies packed rows by all panels of the weight, in one phase of the team; each thread has `sums`, memory for
  // sums_size(rows) numbers. If twin > 0, panels 0 .. twin - 1 are each computed together with their twin, the panel
  // `twin` further on (gate and up projection).
  void multiply(Team& team, Member member, char* input, int64_t rows, float* sums, int64_t twin,
                const Epilogue& epilogue) const;
  int64_t sums_size(int64_t rows) const;

 private:
  virtual int64_t height(int64_t rows) const = 0;  // rows with padding, for which sums are computed
  // Returns whether the whole depth is multiplied at once, so that only reading memory takes time.
  virtual bool takes_whole_depth(int64_t rows) const = 0;
  virtual std::unique_ptr<PanelProduct> start(char* input, int64_t rows) const = 0;
};

// The product keeps the weight's memory alive.
std::unique_ptr<Gemm> make_gemm(const PackedWeight& weight, at::ScalarType x_type);

}  // namespace kvmux

// A packed weight that rows of x are multiplied with, whatever its numbers are kept in: what a phase of a step works
// with. Made once for a weight and a type of x. Knows neither who enters the rows nor what becomes of the sums.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <memory>

#include "ops.h"
#include "packed.h"
#include "thread_team.h"

namespace kvmux {

// Takes the sums of panels first .. last - 1: of each [height][PANEL], `size` numbers from one panel's to the next's.
// Behind them are those of their twins, if they have any.
using Put = c10::function_ref<void(int64_t first, int64_t last, const float* sums, int64_t size)>;

class Gemm {
 public:
  static constexpr int64_t PART = PAIR * PANEL;

  explicit Gemm(const PackedWeight& weight) : outputs(weight.outputs), width(weight.width), weight_(weight) {}
  virtual ~Gemm() = default;

  const int64_t outputs, width;

  virtual int64_t room(int64_t rows) const = 0;  // bytes that so many rows of x take once they have entered
  virtual int64_t sums(int64_t rows) const = 0;  // numbers that each thread has room for

  // Row number `row` of `rows`, into the room.
  virtual void enter(char* room, int64_t rows, const void* x, int64_t row) const = 0;

  // The same of a few columns of rows first .. last - 1 alone, x [last - first, PART], if rows can enter in parts;
  // these begin at multiples of PART.
  virtual bool in_parts() const { return false; }
  virtual void enter_part(char*, int64_t, const void*, int64_t, int64_t, int64_t) const {
    TORCH_INTERNAL_ASSERT(false, "rows of this weight enter whole");
  }

  // A phase: all panels; or the first `twin` of them, each with the one `twin` behind it.
  virtual void multiply(Team& team, Member member, char* room, int64_t rows, float* sums, int64_t twin,
                        const Put& put) const = 0;

 private:
  const PackedWeight weight_;  // whose memory stays for as long
};

std::unique_ptr<Gemm> make_gemm(const PackedWeight& weight, at::ScalarType of_x);

}  // namespace kvmux

// Drawing tokens, as torch sees it. Rows are shared among threads.
#include "sample.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "check.h"
#include "dispatch.h"
#include "thread_team.h"

namespace kvmux {
namespace {

using at::Tensor;

Tensor sample(const Tensor& logits, const Tensor& how) {
  expect("sample", "logits", logits, FLOATS, {ANY, SOME});
  expect("sample", "how", how, only(at::kDouble), {logits.size(0), 5});
  Tensor tokens = at::empty({logits.size(0)}, at::kLong);
  auto* to = tokens.data_ptr<int64_t>();
  const auto* drawing = how.const_data_ptr<double>();
  with_type(logits.scalar_type(), [&](auto of_logits) {
    const auto* from = logits.const_data_ptr<decltype(of_logits)>();
    Team::run(logits.size(0), [&](Team& team, Member member) {
      team.share(member, logits.size(0), [&](int64_t row) {
        const double* d = drawing + row * how.stride(0);
        to[row] = sample_row(from + row * logits.stride(0), logits.size(1), {d[0], d[1], d[2], d[3], d[4]});
      });
    });
  });
  return tokens;
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("sample(Tensor logits, Tensor how) -> Tensor", &kvmux::sample);
}

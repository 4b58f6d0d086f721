// `Ops.sample` for torch; rows are shared among threads. Does not know how a token is drawn.
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

Tensor sample(const Tensor& logits, const Tensor& params) {
  expect("sample", "logits", logits, FLOATS, {ANY, SOME});
  expect("sample", "params", params, only(at::kDouble), {logits.size(0), 5});
  Tensor tokens = at::empty({logits.size(0)}, at::kLong);
  auto* to = tokens.data_ptr<int64_t>();
  const auto* numbers = params.const_data_ptr<double>();
  with_type(logits.scalar_type(), [&](auto of_logits) {
    const auto* from = logits.const_data_ptr<decltype(of_logits)>();
    Team::run(logits.size(0), [&](Team& team, Member member) {
      team.share(member, logits.size(0), [&](int64_t row) {
        const double* p = numbers + row * params.stride(0);
        to[row] = sample_row(from + row * logits.stride(0), logits.size(1), {p[0], p[1], p[2], p[3], p[4]});
      });
    });
  });
  return tokens;
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("sample(Tensor logits, Tensor params) -> Tensor", &kvmux::sample);
}

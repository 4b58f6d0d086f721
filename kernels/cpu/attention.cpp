// Attention over the KV memory of a step: how the work is cut into pieces for threads, and the operations `write_kv`
// and `attend` for torch.
#include "attention.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attend.h"
#include "attend_amx.h"
#include "check.h"
#include "dispatch.h"
#include "thread_team.h"

namespace kvmux {
namespace {

using at::Tensor;

int64_t splits_before(int64_t position) { return (position + SPLIT - 1) / SPLIT; }

template <typename T, typename KV>
void write(const Memory& k_plane, const Memory& v_plane, const Rows& rows, int64_t row, int64_t i, Heads<const char> k,
           Heads<const char> v) {
  const int64_t slot = rows.layout.slot(rows.start(row) + i), token = rows.first(row) + i;
  const int64_t block = rows.blocks(row)[slot / rows.layout.block_size], at = slot % rows.layout.block_size;
  const auto into = [&](const Memory& plane, Heads<const char> x) {
    for (int64_t h = 0; h < plane.heads; ++h)
      write_vector(x.at<T>(token, h), plane.head<KV>(h) + block * plane.block_stride + at * plane.vector_stride,
                   plane.dim);
  };
  into(k_plane, k);
  into(v_plane, v);
}

template <typename AttentionHead>
int64_t partial_width(int64_t v_dim) {
  return AttentionHead::padded(v_dim) + 2;  // top, total, values
}

// Divides the sums of a head's query rows by their totals and stores the results; a sink logit adds to the total, and
// has no value.
template <int64_t ROWS, typename T>
void finish(const AttentionCall& call, const Part& part, OnlineSoftmax<ROWS>& sums, int64_t width) {
  for (int64_t r = 0; r < part.rows.count; ++r) {
    const int64_t token = call.rows.first(part.row) + part.rows.query(r),
                  h = part.head * call.group + part.rows.head(r);
    if (call.sink_logits != nullptr) {
      if (call.sink_logits[h] > sums.top[r]) sums.raise(r, call.sink_logits[h], width);
      sums.total[r] += std::exp(call.sink_logits[h] - sums.top[r]);
    }
    from_float(sums.values + r * width, 1.f / sums.total[r], call.out.at<T>(token, h), call.v.dim);
  }
}

template <typename AttentionHead, typename T>
void item(const AttentionCall& call, const Item& item, const Item* next) {
  using KV = typename AttentionHead::Kept;
  const auto& [part, begin, end, partial] = item;
  const int64_t width = AttentionHead::padded(call.v.dim), stride = partial_width<AttentionHead>(call.v.dim);
  const auto plane = [&](const Memory& memory, const Part& of) {
    const auto blocks = call.rows.blocks(of.row);
    return Plane<KV>{memory.head<KV>(of.head), memory.block_stride, memory.vector_stride, memory.dim, blocks,
                     call.rows.layout};
  };
  AttentionHead head(plane(call.k, part), plane(call.v, part), call.plan.mask, call.scores, part.rows);
  if constexpr (requires { &AttentionHead::set_next; })
    if (next != nullptr)
      head.set_next(plane(call.k, next->part), plane(call.v, next->part), next->part.rows, next->begin);
  for (int64_t r = 0; r < part.rows.count; ++r)
    head.set_query(
        r, call.q.at<T>(call.rows.first(part.row) + part.rows.query(r), part.head * call.group + part.rows.head(r)));
  OnlineSoftmax<AttentionHead::ROWS> sums;
  head.attend(begin, end, sums);
  if (partial < 0) return finish<AttentionHead::ROWS, T>(call, part, sums, width);
  for (int64_t r = 0; r < part.rows.count; ++r) {
    float* to = call.partials + (partial + r) * stride;
    to[0] = sums.top[r];
    to[1] = sums.total[r];
    std::memcpy(to + 2, sums.values + r * width, width * sizeof(float));
  }
}

template <typename AttentionHead, typename T>
void merge(const AttentionCall& call, const Merge& merge) {
  const auto& [part, splits, partial] = merge;
  const int64_t width = AttentionHead::padded(call.v.dim), stride = partial_width<AttentionHead>(call.v.dim);
  OnlineSoftmax<AttentionHead::ROWS> sums;
  sums.clear(part.rows.count, width);
  for (int64_t i = 0; i < splits * part.rows.count; ++i) {
    const float* from = call.partials + (partial + i) * stride;
    sums.merge(i % part.rows.count, from[0], from[1], from + 2, width);
  }
  finish<AttentionHead::ROWS, T>(call, part, sums, width);
}

template <typename AttentionHead, typename T>
AttentionKernels kernels_by() {
  return {AttentionHead::ROWS, partial_width<AttentionHead>, item<AttentionHead, T>, merge<AttentionHead, T>,
          write<T, typename AttentionHead::Kept>};
}

template <typename T, typename KV>
AttentionKernels kernels_of() {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, at::BFloat16> && std::is_same_v<KV, T>) return kernels_by<AmxAttentionHead, T>();
#endif
  return kernels_by<AttentionHead<KV>, T>();
}

}  // namespace

const Item* next_of(const Plan& plan, int64_t i) {
  return i + 1 < static_cast<int64_t>(plan.items.size()) ? &plan.items[i + 1] : nullptr;
}

// Cuts the attention of a step into pieces of work for threads: a chunk of a prompt by queries, with at most `most`
// query rows in a piece; a single query, whose sequence may be long, by splits of its sequence.
Plan plan(const Rows& rows, int64_t kv_heads, int64_t group, const Mask& mask, int64_t most) {
  Plan work{.mask = mask};
  const auto add = [&](const Part& part, bool alone) {
    const int64_t oldest = part.rows.position(0), end = splits_before(part.rows.position(part.rows.count - 1) + 1);
    const int64_t begin = mask.sinks_of(oldest).empty() ? mask.latest(oldest).begin / SPLIT : 0;
    if (!alone || end - begin == 1) return work.items.push_back({part, begin, end, -1});
    work.merges.push_back({part, end - begin, work.partials});
    for (int64_t split = begin; split < end; ++split, work.partials += part.rows.count)
      work.items.push_back({part, split, split + 1, work.partials});
  };
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.is_padding(row)) continue;
    const int64_t queries = rows.tokens(row);
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t first = 0; first < queries * group; first += most)
        add({row, head, {rows.start(row), first, std::min(most, queries * group - first), group}}, queries == 1);
  }
  return work;
}

AttentionKernels attention_kernels(at::ScalarType q, at::ScalarType kept) {
  AttentionKernels found{};
  with_type(q, [&](auto of_q) {
    with_kept_type(kept, [&](auto of_k) { found = kernels_of<decltype(of_q), decltype(of_k)>(); });
  });
  return found;
}

void expect_rows(const char* operation, const Tensor& table, const Tensor& row_seat, const Tensor& q_start,
                 const Tensor& start, const Layout& layout, int64_t tokens) {
  constexpr Types ADDRESSES = only(at::kInt);
  expect(operation, "start", start, ADDRESSES, {ANY});
  const int64_t rows = start.size(0);
  expect(operation, "table", table, ADDRESSES, {SOME, SOME});
  expect(operation, "row_seat", row_seat, ADDRESSES, {rows});
  expect(operation, "q_start", q_start, ADDRESSES, {rows + 1});
  TORCH_CHECK_VALUE(layout.block_size > 0 && layout.sinks >= 0 && layout.ring >= 0, operation, ": blocks of ",
                    layout.block_size, " slots, ", layout.sinks, " sinks and a ring of ", layout.ring);
  const auto* first = q_start.const_data_ptr<int32_t>();
  bool in_order = first[0] >= 0 && first[rows] <= tokens;
  for (int64_t row = 0; row < rows; ++row) in_order &= first[row] <= first[row + 1];
  TORCH_CHECK_VALUE(in_order, operation, ": q_start must count up to ", tokens, " tokens at most, and is ", q_start);
}

void expect_plane(const char* operation, const Memory& plane, int64_t heads, int64_t dim, int64_t block_size) {
  TORCH_CHECK_VALUE(plane.heads == heads && plane.dim == dim && plane.block_size == block_size, operation, ": ", heads,
                    " heads of ", dim, " in blocks of ", block_size, " do not fit a store of ", plane.heads,
                    " heads of ", plane.dim, " in blocks of ", plane.block_size);
}

Mask mask_of(int64_t model_window, int64_t window, int64_t sinks) {
  return {std::min(model_window, window), model_window, window < model_window ? sinks : 0};
}

namespace {

template <typename Byte>
Heads<Byte> heads(const Tensor& x) {
  return {static_cast<Byte*>(x.mutable_data_ptr()), x.stride(0), x.stride(1)};
}

// Throws unless the tensors have the shapes that `Memory` needs and types that there are kernels for.
void expect_planes(const char* operation, const Tensor& k, const Tensor& v) {
  constexpr Types KEPT = FLOATS | only(at::kChar);
  expect(operation, "the keys' memory", k, KEPT, {ANY, SOME, SOME, SOME});
  expect(operation, "the values' memory", v, only(k.scalar_type()), {k.size(0), k.size(1), k.size(2), SOME});
}

void write_kv(const Tensor& k_plane, const Tensor& v_plane, const Tensor& k, const Tensor& v, const Tensor& table,
              const Tensor& row_seat, const Tensor& q_start, const Tensor& start, int64_t block_size, int64_t sinks,
              int64_t ring) {
  expect_planes("write_kv", k_plane, v_plane);
  expect("write_kv", "k", k, FLOATS, {ANY, k_plane.size(1), k_plane.size(3)});
  expect("write_kv", "v", v, only(k.scalar_type()), {k.size(0), v_plane.size(1), v_plane.size(3)});
  const Layout layout{block_size, sinks, ring};
  expect_rows("write_kv", table, row_seat, q_start, start, layout, k.size(0));
  expect_plane("write_kv", Memory(k_plane), k.size(1), k.size(2), block_size);
  const Rows rows(table, row_seat, q_start, start, layout);
  const auto write = attention_kernels(k.scalar_type(), k_plane.scalar_type()).write;
  const Memory keys(k_plane), values(v_plane);
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.is_padding(row)) continue;
    over_rows(rows.tokens(row), k.size(1) * k.size(2), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        write(keys, values, rows, row, i, heads<const char>(k), heads<const char>(v));
    });
  }
}

void attend(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& table,
            const Tensor& row_seat, const Tensor& q_start, const Tensor& start, int64_t block_size, int64_t sinks,
            int64_t ring, int64_t model_window, int64_t window, double scale, double softcap,
            const std::optional<Tensor>& sink_logits) {
  expect_planes("attend", k, v);
  expect_plane("attend", Memory(k), k.size(1), k.size(3), block_size);
  expect("attend", "q", q, FLOATS, {ANY, SOME, k.size(3)});
  expect("attend", "out", out, only(q.scalar_type()), {q.size(0), q.size(1), v.size(3)});
  expect("attend", "sink_logits", sink_logits, FLOATS, {q.size(1)});
  const Tensor logits = sink_logits ? sink_logits->to(at::kFloat) : Tensor();
  TORCH_CHECK_VALUE(q.size(1) % k.size(1) == 0, "attend: ", q.size(1), " query heads cannot share ", k.size(1),
                    " heads of keys");
  TORCH_CHECK_VALUE(model_window > 0 && window > 0, "attend: windows of ", model_window, " and ", window);
  TORCH_CHECK_VALUE(std::max(k.size(3), v.size(3)) <= MAX_DIM, "attend: heads wider than ", MAX_DIM);
  const Layout layout{block_size, sinks, ring};
  expect_rows("attend", table, row_seat, q_start, start, layout, q.size(0));
  const Rows rows(table, row_seat, q_start, start, layout);
  const Mask mask = mask_of(model_window, window, sinks);
  const AttentionKernels kernels = attention_kernels(q.scalar_type(), k.scalar_type());
  const int64_t group = q.size(1) / k.size(1);
  const Plan work = plan(rows, k.size(1), group, mask, kernels.most_rows);
  const Tensor partials = at::empty({work.partials, kernels.width(v.size(3))}, at::kFloat);
  const AttentionCall call{
      .rows = rows,
      .plan = work,
      .k = Memory(k),
      .v = Memory(v),
      .scores = {static_cast<float>(scale), static_cast<float>(softcap)},
      .sink_logits = logits.defined() ? logits.const_data_ptr<float>() : nullptr,
      .group = group,
      .q = heads<const char>(q),
      .out = heads<char>(out),
      .partials = partials.data_ptr<float>(),
  };
  Team::run(work.items.size(), [&](Team& team, Member member) {
    team.share(member, work.items.size(), [&](int64_t i) { kernels.item(call, work.items[i], next_of(work, i)); });
    team.share(member, work.merges.size(), [&](int64_t i) { kernels.merge(call, work.merges[i]); });
  });
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def(
      "write_kv(Tensor(a!) k_plane, Tensor(b!) v_plane, Tensor k, Tensor v, Tensor table, Tensor row_seat, "
      "Tensor q_start, Tensor start, int block_size, int sinks, int ring) -> ()",
      &kvmux::write_kv);
  library.def(
      "attend(Tensor(a!) out, Tensor q, Tensor k_plane, Tensor v_plane, Tensor table, Tensor row_seat, "
      "Tensor q_start, Tensor start, int block_size, int sinks, int ring, int model_window, int window, float scale, "
      "float softcap, Tensor? sink_logits) -> ()",
      &kvmux::attend);
}

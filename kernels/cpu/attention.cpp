// Attention over the KV memory of a step: how the work is cut into pieces for threads, and the operations `write_kv`,
// `attend` and `check_slots` for torch. Does not know how a head is computed (attend.h, attend_bf16.h).
#include "attention.h"

#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "attend.h"
#include "attend_bf16.h"
#include "attend_int.h"
#include "dispatch.h"
#include "kv_formats.h"
#include "thread_team.h"

namespace kvmux {
namespace {

using at::Tensor;

template <typename T>
void write_token(const Plane& k_plane, const Plane& v_plane, const Rows& rows, int64_t heads, int64_t row, int64_t i,
                 Heads<const char> k, Heads<const char> v) {
  const int64_t token = rows.first(row) + i;
  c10::SmallVector<float, MAX_DIM> scratch(std::max(k_plane.dim, v_plane.dim));
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t slot = rows.layout.slot(rows.start(row, h) + i), at = slot % rows.layout.block_size;
    const int64_t block = rows.blocks(row, h)[slot / rows.layout.block_size];
    const auto into = [&](const Plane& plane, Heads<const char> x) {
      char* const to = plane.head(rows.head_in_block(h)) + block * plane.block_stride + at * plane.vector_stride;
      write_vector(x.at<T>(token, h), plane.format, plane.center(h), plane.rotated, to, plane.dim, scratch.data());
    };
    into(k_plane, k);
    into(v_plane, v);
  }
}

template <typename AttentionHead>
int64_t partial_size(int64_t v_dim) {
  return OnlineSoftmax<AttentionHead::ROWS>::stored_size(AttentionHead::padded(v_dim));
}

// Divides the sums of a head's query rows by their totals, rotates them back if values are rotated, and stores the
// results, and the logarithms of the sums if they are wanted; a sink logit adds to the total, and has no value.
template <int64_t ROWS, typename T>
void finish(const AttentionCall& call, const Part& part, OnlineSoftmax<ROWS>& sums, int64_t width) {
  for (int64_t r = 0; r < part.rows.count; ++r) {
    const int64_t token = call.rows.first(part.row) + part.rows.query(r),
                  h = part.head * call.group + part.rows.head(r);
    if (call.sink_logits != nullptr) {
      if (call.sink_logits[h] > sums.top[r]) sums.raise(r, call.sink_logits[h], width);
      sums.total[r] += std::exp(call.sink_logits[h] - sums.top[r]);
    }
    if (call.lse.numbers != nullptr) {
      constexpr float NO_NUMBER = std::numeric_limits<float>::quiet_NaN();
      // A weight is at most 1: only a score that is NaN makes the total infinite, as exp_u20 does.
      const float total = std::isfinite(sums.total[r]) ? sums.total[r] : NO_NUMBER;
      *call.lse.at<float>(token, h) = sums.top[r] + std::log(total);
    }
    float* const values = sums.values + r * width;
    T* const out = call.out.at<T>(token, h);
    const float factor = 1.f / sums.total[r];
    if (!call.v.rotated) {
      from_float(values, factor, out, call.v.dim);
      continue;
    }
    from_float(values, factor, values, call.v.dim);
    rotate(values, call.v.dim);
    convert(values, out, call.v.dim);
  }
}

// Returns the stored keys and values of a part.
KVView view_of(const AttentionCall& call, const Part& part) {
  const auto vectors = [&](const Plane& plane) {
    return StoredVectors{plane.head(call.rows.head_in_block(part.head)),
                         plane.block_stride,
                         plane.vector_stride,
                         plane.dim,
                         plane.format,
                         plane.rotated,
                         call.rows.blocks(part.row, part.head),
                         call.rows.layout};
  };
  return {vectors(call.k), vectors(call.v), call.rows.mask(call.plan.mask, part.row, part.head), part.rows};
}

template <typename AttentionHead, typename T>
void attend_item(const AttentionCall& call, const Item& item, const Item* next) {
  const auto& [part, begin, end, partial] = item;
  const int64_t width = AttentionHead::padded(call.v.dim), size = partial_size<AttentionHead>(call.v.dim);
  AttentionHead head(view_of(call, part), call.scores);
  if (next != nullptr) head.set_next(view_of(call, next->part), next->begin);
  for (int64_t r = 0; r < part.rows.count; ++r)
    head.set_query(
        r, call.q.at<T>(call.rows.first(part.row) + part.rows.query(r), part.head * call.group + part.rows.head(r)));
  OnlineSoftmax<AttentionHead::ROWS> sums;
  head.attend(begin, end, sums);
  if (partial < 0) return finish<AttentionHead::ROWS, T>(call, part, sums, width);
  for (int64_t r = 0; r < part.rows.count; ++r) sums.store(r, call.partials + (partial + r) * size, width);
}

template <typename AttentionHead, typename T>
void merge_splits(const AttentionCall& call, const Merge& merge) {
  const auto& [part, splits, partial] = merge;
  const int64_t width = AttentionHead::padded(call.v.dim), size = partial_size<AttentionHead>(call.v.dim);
  OnlineSoftmax<AttentionHead::ROWS> sums;
  sums.clear(part.rows.count, width);
  for (int64_t i = 0; i < splits * part.rows.count; ++i)
    sums.merge_stored(i % part.rows.count, call.partials + (partial + i) * size, width);
  finish<AttentionHead::ROWS, T>(call, part, sums, width);
}

template <typename AttentionHead, typename T>
AttentionKernels kernels_by() {
  return {AttentionHead::ROWS, partial_size<AttentionHead>, attend_item<AttentionHead, T>,
          merge_splits<AttentionHead, T>, write_token<T>};
}

template <typename T>
AttentionKernels kernels_of([[maybe_unused]] at::ScalarType k, [[maybe_unused]] at::ScalarType v) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
#if defined(__AMX_BF16__)
    if (is_int_format(k) && is_int_format(v)) return kernels_by<IntAttentionHead<AmxIntProducts>, T>();
    if (k == at::kBFloat16 && v == at::kBFloat16) return kernels_by<Bf16AttentionHead<AmxProducts>, T>();
#elif defined(CPU_CAPABILITY_AVX512)
    if (is_int_format(k) && is_int_format(v)) return kernels_by<IntAttentionHead<VnniIntProducts>, T>();
#endif
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    if (k == at::kBFloat16 && v == at::kBFloat16) return kernels_by<Bf16AttentionHead<DotProducts>, T>();
#endif
  }
  return kernels_by<AttentionHead, T>();
}

}  // namespace

Plan make_plan(const Rows& rows, int64_t kv_heads, int64_t group, const Mask& common, int64_t most_rows) {
  Plan work{.mask = common};
  const auto add = [&](const Part& part, bool alone) {
    const Mask mask = rows.mask(common, part.row, part.head);
    const int64_t oldest = part.rows.position(0), newest = part.rows.position(part.rows.count - 1);
    const auto next_split = [&](int64_t split) { return mask.next_seen(oldest, newest, split * SPLIT) / SPLIT; };
    const int64_t begin = next_split(0), end = newest / SPLIT + 1;
    if (!alone || end - begin == 1) return work.items.push_back({part, begin, end, -1});
    Merge merge{part, 0, work.partials};
    for (int64_t split = begin; split < end; split = next_split(split + 1), work.partials += part.rows.count) {
      work.items.push_back({part, split, split + 1, work.partials});
      ++merge.splits;
    }
    work.merges.push_back(merge);
  };
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.is_padding(row)) continue;
    const int64_t queries = rows.tokens(row);
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t first = 0; first < queries * group; first += most_rows)
        add({row, head, {rows.start(row, head), first, std::min(most_rows, queries * group - first), group}},
            queries == 1);
  }
  return work;
}

AttentionKernels attention_kernels(at::ScalarType q, at::ScalarType k, at::ScalarType v) {
  AttentionKernels found{};
  with_type(q, [&](auto of_q) { found = kernels_of<decltype(of_q)>(k, v); });
  return found;
}

namespace {

template <typename Byte>
Heads<Byte> heads(const Tensor& x) {
  return {static_cast<Byte*>(x.mutable_data_ptr()), x.stride(0), x.stride(1)};
}

// Returns the number of heads whose addresses differ; 0 if all heads of a token are in one block.
int64_t split_heads_of(const Tensor& start, int64_t heads) { return start.dim() == 2 ? heads : 0; }

void write_kv(const Tensor& k_plane, const Tensor& v_plane, bool k_rotated, bool v_rotated,
              const std::optional<Tensor>& k_center, const Tensor& k, const Tensor& v, const Tensor& table,
              const Tensor& table_row, const Tensor& q_start, const Tensor& start,
              const std::optional<Tensor>& window_start, int64_t block_size, int64_t sinks, int64_t ring,
              int64_t num_decode, int64_t max_q, int64_t max_kv) {
  expect_planes("write_kv", k_plane, v_plane);
  Plane keys(k_plane, k_rotated);
  const Plane values(v_plane, v_rotated);
  expect("write_kv", "k", k, FLOATS, {ANY, SOME, keys.dim});
  keys.centers = centers_of("write_kv", k_center, k.size(1), keys.dim);
  expect("write_kv", "v", v, only(k.scalar_type()), {k.size(0), k.size(1), values.dim});
  const int64_t heads_split = split_heads_of(start, k.size(1));
  const Addresses addresses{
      table, table_row, q_start, start, window_start, {block_size, sinks, ring}, {num_decode, max_q, max_kv}};
  expect_rows("write_kv", addresses, heads_split, k_plane.size(0), k.size(0));
  expect_plane("write_kv", keys, heads_split ? 1 : k.size(1), k.size(2), block_size);
  const Rows rows(addresses);
  const auto write = attention_kernels(k.scalar_type(), keys.format, values.format).write;
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.is_padding(row)) continue;
    parallel_over_rows(rows.tokens(row), k.size(1) * k.size(2), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        write(keys, values, rows, k.size(1), row, i, heads<const char>(k), heads<const char>(v));
    });
  }
}

void attend(const Tensor& out, const Tensor& q, const Tensor& k_plane, const Tensor& v_plane, bool k_rotated,
            bool v_rotated, int64_t kv_heads, const Tensor& table, const Tensor& table_row, const Tensor& q_start,
            const Tensor& start, const std::optional<Tensor>& window_start, int64_t block_size, int64_t sinks,
            int64_t ring, int64_t num_decode, int64_t max_q, int64_t max_kv, int64_t model_window, int64_t window,
            double scale, double softcap, const std::optional<Tensor>& sink_logits, const std::optional<Tensor>& lse) {
  expect_planes("attend", k_plane, v_plane);
  const Plane keys(k_plane, k_rotated), values(v_plane, v_rotated);
  expect("attend", "q", q, FLOATS, {ANY, SOME, keys.dim});
  expect("attend", "out", out, only(q.scalar_type()), {q.size(0), q.size(1), values.dim});
  expect("attend", "lse", lse, only(at::kFloat), {q.size(0), q.size(1)});
  expect("attend", "sink_logits", sink_logits, FLOATS, {q.size(1)});
  const Tensor logits = sink_logits ? sink_logits->to(at::kFloat) : Tensor();
  TORCH_CHECK_VALUE(kv_heads > 0 && q.size(1) % kv_heads == 0, "attend: ", q.size(1), " query heads cannot share ",
                    kv_heads, " heads of keys");
  TORCH_CHECK_VALUE(model_window > 0 && window > 0, "attend: windows of ", model_window, " and ", window);
  TORCH_CHECK_VALUE(std::max(keys.dim, values.dim) <= MAX_DIM, "attend: heads wider than ", MAX_DIM);
  const int64_t heads_split = split_heads_of(start, kv_heads);
  expect_plane("attend", keys, heads_split ? 1 : kv_heads, keys.dim, block_size);
  const Addresses addresses{
      table, table_row, q_start, start, window_start, {block_size, sinks, ring}, {num_decode, max_q, max_kv}};
  expect_rows("attend", addresses, heads_split, k_plane.size(0), q.size(0));
  const Rows rows(addresses);
  const Mask mask = mask_of(rows, model_window, window);
  const AttentionKernels kernels = attention_kernels(q.scalar_type(), keys.format, values.format);
  const int64_t group = q.size(1) / kv_heads;
  const Plan work = make_plan(rows, kv_heads, group, mask, kernels.most_rows);
  const Tensor partials = at::empty({work.partials, kernels.partial_size(values.dim)}, at::kFloat);
  const AttentionCall call{
      .rows = rows,
      .plan = work,
      .k = keys,
      .v = values,
      .scores = {static_cast<float>(scale), static_cast<float>(softcap)},
      .sink_logits = logits.defined() ? logits.const_data_ptr<float>() : nullptr,
      .group = group,
      .q = heads<const char>(q),
      .out = heads<char>(out),
      .partials = partials.data_ptr<float>(),
      .lse = lse ? Heads<float>{lse->data_ptr<float>(), lse->stride(0), lse->stride(1)} : Heads<float>{},
  };
  Team::run(work.items.size(), [&](Team& team, Member member) {
    team.share(member, work.items.size(), [&](int64_t i) { kernels.attend(call, work.items[i], work.next(i)); });
    team.share(member, work.merges.size(), [&](int64_t i) { kernels.merge(call, work.merges[i]); });
  });
}

void check_slots(const Tensor& k_plane, int64_t kv_heads, const Tensor& table, const Tensor& table_row,
                 const Tensor& q_start, const Tensor& start, const std::optional<Tensor>& window_start,
                 int64_t block_size, int64_t sinks, int64_t ring, int64_t num_decode, int64_t max_q, int64_t max_kv,
                 int64_t tokens) {
  expect("check_slots", "the keys' memory", k_plane, KV_TYPES, {ANY, SOME, block_size, SOME});
  const Addresses addresses{
      table, table_row, q_start, start, window_start, {block_size, sinks, ring}, {num_decode, max_q, max_kv}};
  expect_rows("check_slots", addresses, split_heads_of(start, kv_heads), k_plane.size(0), tokens);
  TORCH_CHECK_VALUE(q_start.const_data_ptr<int32_t>()[q_start.size(0) - 1] == tokens, "check_slots: the rows have ",
                    q_start, " tokens instead of ", tokens);
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def(
      "write_kv(Tensor(a!) k_plane, Tensor(b!) v_plane, bool k_rotated, bool v_rotated, Tensor? k_center, "
      "Tensor k, Tensor v, Tensor table, Tensor table_row, Tensor q_start, Tensor start, Tensor? window_start, int "
      "block_size, int sinks, int ring, int num_decode, int max_q, int max_kv) -> ()",
      &kvmux::write_kv);
  library.def(
      "check_slots(Tensor k_plane, int kv_heads, Tensor table, Tensor table_row, Tensor q_start, Tensor start, "
      "Tensor? window_start, int block_size, int sinks, int ring, int num_decode, int max_q, int max_kv, int tokens) "
      "-> ()",
      &kvmux::check_slots);
  library.def(
      "attend(Tensor(a!) out, Tensor q, Tensor k_plane, Tensor v_plane, bool k_rotated, bool v_rotated, int kv_heads, "
      "Tensor table, Tensor table_row, "
      "Tensor q_start, Tensor start, Tensor? window_start, int block_size, int sinks, int ring, int num_decode, int "
      "max_q, int max_kv, int model_window, "
      "int window, float scale, float softcap, Tensor? sink_logits, Tensor(b!)? lse) -> ()",
      &kvmux::attend);
}

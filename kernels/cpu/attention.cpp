// The KV memory of a step and attention over it, as torch sees them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "attend.h"
#include "attend_amx.h"
#include "sharing.h"

namespace kvmux {
namespace {

using at::Tensor;

// ---------------------------------------------------------------- KV memory
// The rows of a step, and where each lies: `kernels.ops.Slots`.
struct Rows {
  Rows(const Tensor& table, const Tensor& row_seat, const Tensor& q_start, const Tensor& start, const Layout& layout)
      : count(start.numel()), layout(layout), table_(table.const_data_ptr<int32_t>()), width_(table.stride(0)),
        seats_(row_seat.const_data_ptr<int32_t>()), first_(q_start.const_data_ptr<int32_t>()),
        starts_(start.const_data_ptr<int32_t>()) {}

  bool idle(int64_t row) const { return starts_[row] < 0; }
  int64_t start(int64_t row) const { return starts_[row]; }  // position of its first token
  int64_t first(int64_t row) const { return first_[row]; }   // that token's number in the step
  int64_t tokens(int64_t row) const { return first_[row + 1] - first_[row]; }
  const int32_t* blocks(int64_t row) const { return table_ + seats_[row] * width_; }

  const int64_t count;
  const Layout layout;

 private:
  const int32_t* table_;
  int64_t width_;
  const int32_t *seats_, *first_, *starts_;
};

void write_kv(const Tensor& k_plane, const Tensor& v_plane, const Tensor& k, const Tensor& v, const Tensor& table,
              const Tensor& row_seat, const Tensor& q_start, const Tensor& start, int64_t block_size, int64_t sinks,
              int64_t ring) {
  const Rows rows(table, row_seat, q_start, start, {block_size, sinks, ring});
  with_type(k.scalar_type(), [&](auto of_x) {
    with_kept_type(k_plane.scalar_type(), [&](auto of_kv) {
      using T = decltype(of_x);
      using KV = decltype(of_kv);
      const auto into = [&](const Tensor& plane, const Tensor& x, int64_t token, int64_t block, int64_t at) {
        const T* from = x.const_data_ptr<T>() + token * x.stride(0);
        KV* to = plane.data_ptr<KV>() + block * plane.stride(0) + at * plane.stride(2);
        for (int64_t h = 0; h < plane.size(1); ++h)
          write_vector(from + h * x.stride(1), to + h * plane.stride(1), plane.size(3));
      };
      for (int64_t row = 0; row < rows.count; ++row) {
        if (rows.idle(row)) continue;
        over_rows(rows.tokens(row), k.size(1) * k.size(2), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t slot = rows.layout.slot(rows.start(row) + i), block = rows.blocks(row)[slot / block_size];
            into(k_plane, k, rows.first(row) + i, block, slot % block_size);
            into(v_plane, v, rows.first(row) + i, block, slot % block_size);
          }
        });
      }
    });
  });
}

// ---------------------------------------------------------------- attention
// Query rows of one head of one row of the batch.
struct Part {
  int64_t row, head;
  QueryRows rows;
};

// A part over some splits of its text. Whoever does not see all of it leaves partial sums, one for each query row.
struct Item {
  Part part;
  int64_t begin, end;  // splits
  int64_t partial;     // the first of them; < 0: the item is the whole
};

// The partial sums of all splits of a text, in order.
struct Merge {
  Part part;
  int64_t splits, partial;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Merge> merges;
  int64_t partials = 0;
};

int64_t splits_before(int64_t position) { return (position + SPLIT - 1) / SPLIT; }

// A chunk is shared among threads by queries, `most` of whose rows go together; a single query, which may have a long
// text to itself, by splits.
Plan plan(const Rows& rows, int64_t kv_heads, int64_t group, const Sight& sight, int64_t most) {
  Plan work;
  const auto add = [&](const Part& part, bool alone) {
    const int64_t oldest = part.rows.position(0), end = splits_before(part.rows.position(part.rows.count - 1) + 1);
    const int64_t begin = sight.sinks_of(oldest).empty() ? sight.latest(oldest).begin / SPLIT : 0;
    if (!alone || end - begin == 1) return work.items.push_back({part, begin, end, -1});
    work.merges.push_back({part, end - begin, work.partials});
    for (int64_t split = begin; split < end; ++split, work.partials += part.rows.count)
      work.items.push_back({part, split, split + 1, work.partials});
  };
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.idle(row)) continue;
    const int64_t queries = rows.tokens(row);
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t first = 0; first < queries * group; first += most)
        add({row, head, {rows.start(row), first, std::min(most, queries * group - first), group}}, queries == 1);
  }
  return work;
}

// The sums of a head's query rows become the output of its tokens; `sink_logits` [heads] have no value.
template <int64_t ROWS, typename T>
void finish(Sums<ROWS>& sums, const QueryRows& rows, int64_t head, int64_t width, const float* sink_logits, int64_t v_dim,
            T* out, int64_t token_stride, int64_t head_stride) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t token = rows.query(r), h = head * rows.group + rows.head(r);
    if (sink_logits != nullptr) {
      if (sink_logits[h] > sums.top[r]) sums.raise(r, sink_logits[h], width);
      sums.total[r] += std::exp(sink_logits[h] - sums.top[r]);
    }
    from_float(sums.values + r * width, 1.f / sums.total[r], out + token * token_stride + h * head_stride, v_dim);
  }
}

template <typename Head, typename T>
void attend_by(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const Rows& rows,
               const Sight& sight, const Scores& scores, const float* sink_logits) {
  using KV = typename Head::Kept;
  const int64_t kv_heads = k.size(1), group = q.size(1) / kv_heads, v_dim = out.size(2);
  TORCH_CHECK(std::max(q.size(2), v_dim) <= MAX_DIM, "heads wider than ", MAX_DIM);
  const Plan work = plan(rows, kv_heads, group, sight, Head::ROWS);
  const int64_t width = Head::padded(v_dim), stride = width + 2;
  const Tensor partials = at::empty({work.partials, stride}, at::kFloat);  // top, total, values
  const auto partial = [&](int64_t i) { return partials.data_ptr<float>() + i * stride; };
  const auto plane = [&](const Tensor& memory, const Part& part) {
    return Plane<KV>{memory.const_data_ptr<KV>() + part.head * memory.stride(1), memory.stride(0), memory.stride(2),
                     memory.size(3), rows.blocks(part.row), rows.layout};
  };
  const auto finish_part = [&](const Part& part, Sums<Head::ROWS>& sums) {
    T* tokens = out.data_ptr<T>() + rows.first(part.row) * out.stride(0);
    finish(sums, part.rows, part.head, width, sink_logits, v_dim, tokens, out.stride(0), out.stride(1));
  };
  share(work.items.size(), [&](int64_t i) {
    const auto& [part, begin, end, left] = work.items[i];
    Head head(plane(k, part), plane(v, part), sight, scores, part.rows);
    const T* tokens = q.const_data_ptr<T>() + rows.first(part.row) * q.stride(0);
    for (int64_t r = 0; r < part.rows.count; ++r) {
      const int64_t h = part.head * group + part.rows.head(r);
      head.take(r, tokens + part.rows.query(r) * q.stride(0) + h * q.stride(1));
    }
    Sums<Head::ROWS> sums;
    head.attend(begin, end, sums);
    if (left < 0) return finish_part(part, sums);
    for (int64_t r = 0; r < part.rows.count; ++r) {
      float* to = partial(left + r);
      to[0] = sums.top[r];
      to[1] = sums.total[r];
      std::memcpy(to + 2, sums.values + r * width, width * sizeof(float));
    }
  });
  for (const auto& [part, splits, left] : work.merges) {
    Sums<Head::ROWS> sums;
    sums.clear(part.rows.count, width);
    for (int64_t i = 0; i < splits * part.rows.count; ++i) {
      const float* from = partial(left + i);
      sums.merge(i % part.rows.count, from[0], from[1], from + 2, width);
    }
    finish_part(part, sums);
  }
}

template <typename T, typename KV>
void attend_as(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const Rows& rows,
               const Sight& sight, const Scores& scores, const float* sink_logits) {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, at::BFloat16> && std::is_same_v<KV, T>)
    if (tiles_permitted()) return attend_by<TiledHead, T>(out, q, k, v, rows, sight, scores, sink_logits);
#endif
  attend_by<Head<KV>, T>(out, q, k, v, rows, sight, scores, sink_logits);
}

void attend(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& table,
            const Tensor& row_seat, const Tensor& q_start, const Tensor& start, int64_t block_size, int64_t sinks,
            int64_t ring, int64_t model_window, int64_t window, double scale, double softcap,
            const std::optional<Tensor>& sink_logits) {
  const Rows rows(table, row_seat, q_start, start, {block_size, sinks, ring});
  const Sight sight{std::min(model_window, window), model_window, window < model_window ? sinks : 0};
  const Scores scores{static_cast<float>(scale), static_cast<float>(softcap)};
  const float* logits = sink_logits ? sink_logits->const_data_ptr<float>() : nullptr;
  with_type(q.scalar_type(), [&](auto of_q) {
    with_kept_type(k.scalar_type(), [&](auto of_k) {
      attend_as<decltype(of_q), decltype(of_k)>(out, q, k, v, rows, sight, scores, logits);
    });
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

// The operation `select_blocks` for torch: selects the blocks of keys whose summaries allow the largest products with a
// query (Quest, Tang et al. 2024, arXiv:2406.10774). The pairs of a row and a KV head are shared among threads, and
// none depends on the others. Knows neither layers nor block tables.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "matmul.h"
#include "online_softmax.h"

namespace kvmux {
namespace {

using at::Tensor;

// The bounds of blocks for the queries of one KV head. Those of TILE blocks are computed together, as a product of the
// queries with their summaries.
template <typename T>
class BlockBounds {
 public:
  BlockBounds(int64_t group, int64_t dim)
      : group_(group), dim_(dim), positive_(group * PITCH), negative_(group * PITCH), products_(group * TILE),
        tile_(2 * dim * TILE) {}

  // Stores a query [dim] as number r of the group.
  template <typename Q>
  void set_query(int64_t r, const Q* query) {
    float* const positive = positive_.data() + r * PITCH;
    float* const negative = negative_.data() + r * PITCH;
    to_float(query, positive, dim_);
    for (int64_t d = 0; d < dim_; ++d) {
      negative[d] = std::min(positive[d], 0.f);
      positive[d] = std::max(positive[d], 0.f);
    }
  }

  // Computes the bounds [n] of blocks: `summary(i)` points to the 2 dim numbers of block i.
  template <typename Summary>
  void compute(const Summary& summary, int64_t n, float* bounds) {
    for (int64_t first = 0; first < n; first += TILE) {
      const T* rows[TILE];
      const int64_t count = std::min(TILE, n - first);
      for (int64_t i = 0; i < TILE; ++i) rows[i] = summary(first + std::min(i, count - 1));
      queue_.clear();
      for (int64_t i = first + TILE; i < std::min(first + 2 * TILE, n); ++i)
        queue_.add(summary(i), 2 * dim_ * static_cast<int64_t>(sizeof(T)));
      for (int64_t i = 0; i < TILE; i += W)
        transpose_rows(rows + i, 2 * dim_, tile_.data() + i, TILE, [this] { queue_.fetch(PORTION); });
      std::ranges::fill(products_, 0.f);
      multiply(positive_, 0);
      multiply(negative_, dim_);
      for (int64_t i = 0; i < count; ++i) bounds[first + i] = largest(i);
    }
  }

 private:
  static constexpr int64_t TILE = 32;    // blocks
  static constexpr int64_t PORTION = 8;  // cache lines prefetched in one go
  static constexpr int PITCH = MAX_DIM + W;
  static_assert(TILE % W == 0);

  // Adds the products of the queries with numbers begin .. begin + dim - 1 of the summaries.
  void multiply(const std::vector<float>& queries, int64_t begin) {
    const auto number = [this, begin](int64_t d) { return tile_.data() + (begin + d) * TILE; };
    multiply_add<PITCH>(group_, queries.data(), number, products_.data(), TILE, TILE, dim_, queue_);
  }

  // Returns the largest bound of a block for any query; a NaN counts as infinite.
  float largest(int64_t i) const {
    float found = -std::numeric_limits<float>::infinity();
    for (int64_t r = 0; r < group_; ++r) {
      const float bound = products_[r * TILE + i];
      if (std::isnan(bound)) return std::numeric_limits<float>::infinity();
      found = std::max(found, bound);
    }
    return found;
  }

  int64_t group_, dim_;
  std::vector<float> positive_, negative_;  // [group, PITCH], the numbers of the queries above 0 and those below
  std::vector<float> products_;             // [group, TILE]
  std::vector<float> tile_;                 // [2 dim, TILE], the summaries
  PrefetchQueue queue_;
};

// Writes the `n` blocks with the largest bounds, in their order; of blocks with equal bounds the first ones. `sorted`
// is scratch memory.
void write_best(const std::vector<float>& bounds, const int32_t* blocks, int64_t n, int32_t* to,
                std::vector<float>& sorted) {
  if (n == 0) return;
  sorted = bounds;
  std::nth_element(sorted.begin(), sorted.begin() + (n - 1), sorted.end(), std::greater<float>());
  const float least = sorted[n - 1];
  int64_t equal = n - std::ranges::count_if(bounds, [least](float bound) { return bound > least; });
  for (size_t i = 0; i < bounds.size(); ++i)
    if (bounds[i] > least || (bounds[i] == least && equal-- > 0)) *to++ = blocks[i];
}

// How many candidates each row has and how many blocks it selects, [rows, 2].
struct Counts {
  explicit Counts(const Tensor& t) : numbers(t.const_data_ptr<int32_t>()), stride(t.stride(0)) {}

  int64_t candidates(int64_t row) const { return numbers[row * stride]; }
  int64_t selected(int64_t row) const { return numbers[row * stride + 1]; }

  const int32_t* numbers;
  int64_t stride;
};

// Returns the numbers of a row and a head in a tensor [rows, heads, ...].
template <typename N>
N* head_of(N* numbers, const Tensor& t, int64_t row, int64_t head) {
  return numbers + row * t.stride(0) + head * t.stride(1);
}

// Throws unless the counts fit the candidates and the output, and the candidates are blocks that have summaries.
void expect_counts(const Counts& counts, const Tensor& out, const Tensor& candidates, int64_t num_blocks) {
  const auto* ids = candidates.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < candidates.size(0); ++row) {
    const int64_t own = counts.candidates(row), selected = counts.selected(row);
    TORCH_CHECK_VALUE(0 <= selected && selected <= own && own <= candidates.size(2) && selected <= out.size(2),
                      "select_blocks: row ", row, " selects ", selected, " of ", own, " candidates, but there are ",
                      candidates.size(2), ", and out has ", out.size(2), " columns");
    for (int64_t head = 0; head < candidates.size(1); ++head) {
      const bool inside = are_indices(head_of(ids, candidates, row, head), own, num_blocks);
      TORCH_CHECK_VALUE(inside, "select_blocks: candidates must be blocks from 0 to ", num_blocks - 1);
    }
  }
}

template <typename T, typename Q>
void select(const Tensor& out, const Tensor& q, const Tensor& summaries, const Tensor& candidates,
            const Counts& counts) {
  const int64_t heads = candidates.size(1), group = q.size(1) / heads, dim = q.size(2);
  const auto* queries = q.const_data_ptr<Q>();
  const auto* numbers = summaries.const_data_ptr<T>();
  const auto* ids = candidates.const_data_ptr<int32_t>();
  auto* selected = out.mutable_data_ptr<int32_t>();
  parallel_over_rows(q.size(0) * heads, candidates.size(2) * 2 * dim, [&](int64_t begin, int64_t end) {
    BlockBounds<T> bounds(group, dim);
    std::vector<float> found, sorted;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / heads, head = i % heads;
      const int32_t* const blocks = head_of(ids, candidates, row, head);
      for (int64_t r = 0; r < group; ++r) bounds.set_query(r, head_of(queries, q, row, head * group + r));
      found.resize(counts.candidates(row));
      const auto summary = [&](int64_t block) { return numbers + blocks[block] * summaries.stride(0); };
      bounds.compute(summary, std::ssize(found), found.data());
      write_best(found, blocks, counts.selected(row), head_of(selected, out, row, head), sorted);
    }
  });
}

void select_blocks(const Tensor& out, const Tensor& q, const Tensor& summaries, const Tensor& candidates,
                   const Tensor& counts) {
  expect("select_blocks", "q", q, FLOATS, {ANY, SOME, SOME});
  const int64_t rows = q.size(0), dim = q.size(2);
  expect("select_blocks", "candidates", candidates, only(at::kInt), {rows, SOME, ANY});
  const int64_t heads = candidates.size(1);
  TORCH_CHECK_VALUE(q.size(1) % heads == 0, "select_blocks: ", q.size(1), " query heads are not a multiple of ", heads,
                    " KV heads");
  TORCH_CHECK_VALUE(dim <= MAX_DIM, "select_blocks: there is no kernel for queries of ", dim, " dimensions");
  expect("select_blocks", "summaries", summaries, FLOATS, {SOME, 2 * dim});
  expect("select_blocks", "counts", counts, only(at::kInt), {rows, 2});
  expect("select_blocks", "out", out, only(at::kInt), {rows, heads, ANY});
  const Counts each(counts);
  expect_counts(each, out, candidates, summaries.size(0));
  with_type(summaries.scalar_type(), [&](auto of_summaries) {
    with_type(q.scalar_type(), [&](auto of_queries) {
      select<decltype(of_summaries), decltype(of_queries)>(out, q, summaries, candidates, each);
    });
  });
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("select_blocks(Tensor(a!) out, Tensor q, Tensor summaries, Tensor candidates, Tensor counts) -> ()",
              &kvmux::select_blocks);
}

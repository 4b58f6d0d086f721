// Attention over the KV memory of a step, cut into pieces of work that threads share. Knows no weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>
#include <vector>

#include "kv_tiles.h"
#include "online_softmax.h"

namespace kvmux {

constexpr int64_t NO_REACH = int64_t{1} << 40;  // a window of so many tokens is none; NO_WINDOW of decoder.py

// What `kernels.types.Slots` says of the sizes of a step: other backends choose kernels and memory by these numbers, so
// they are checked here, too, although no kernel here reads them.
struct StepSizes {
  int64_t num_decode, max_q, max_kv;
};

// The tensors of `kernels.types.Slots`, and its numbers.
struct Addresses {
  const at::Tensor &table, &table_row, &q_start, &start;
  const std::optional<at::Tensor>& window_start;
  Layout layout;
  StepSizes sizes;
};

// The rows of a step and the addresses of their keys. If the heads are split, each KV head has a row of the block table
// and indices of its own.
class Rows {
 public:
  // Takes addresses that have passed the checks of `expect_rows`.
  explicit Rows(const Addresses& at)
      : count(at.start.size(0)), layout(at.layout), heads_(at.start.dim() == 2 ? at.start.size(1) : 1),
        table_(at.table.const_data_ptr<int32_t>()), width_(at.table.stride(0)),
        table_rows_(at.table_row.const_data_ptr<int32_t>()), first_(at.q_start.const_data_ptr<int32_t>()),
        starts_(at.start.const_data_ptr<int32_t>()),
        window_starts_(at.window_start ? at.window_start->const_data_ptr<int32_t>() : nullptr) {}

  bool is_padding(int64_t row) const { return starts_[row * heads_] < 0; }
  int64_t start(int64_t row, int64_t head) const { return starts_[own(row, head)]; }  // index of the row's first token
  int64_t first(int64_t row) const { return first_[row]; }  // number of the row's first token in the step
  int64_t tokens(int64_t row) const { return first_[row + 1] - first_[row]; }
  const int32_t* blocks(int64_t row, int64_t head) const { return table_ + table_rows_[own(row, head)] * width_; }
  int64_t head_in_block(int64_t head) const { return heads_ > 1 ? 0 : head; }

  // Returns which tokens the queries of a row see in a head, given what the step's rows have in common.
  Mask mask(Mask common, int64_t row, int64_t head) const {
    if (!has_window_starts(common.model_reach)) return common;
    common.window_start = window_starts_ + first(row) * heads_ + (heads_ > 1 ? head : 0);
    common.start = start(row, head);
    common.stride = heads_;
    return common;
  }
  // Returns whether the addresses say where the window of a layer begins; not if the layer has none.
  bool has_window_starts(int64_t model_window) const { return window_starts_ != nullptr && model_window != NO_REACH; }

  const int64_t count;
  const Layout layout;

 private:
  int64_t own(int64_t row, int64_t head) const { return heads_ > 1 ? row * heads_ + head : row; }

  int64_t heads_;  // 1: all heads have the same addresses
  const int32_t* table_;
  int64_t width_;
  const int32_t *table_rows_, *first_, *starts_, *window_starts_;
};

// Keys or values of one layer in all blocks, [blocks, heads, block size, dim].
struct Memory {
  explicit Memory(const at::Tensor& plane)
      : numbers(static_cast<char*>(plane.mutable_data_ptr())), type(plane.scalar_type()), heads(plane.size(1)),
        dim(plane.size(3)), block_size(plane.size(2)), block_stride(plane.stride(0)), head_stride(plane.stride(1)),
        vector_stride(plane.stride(2)) {}

  template <typename T>
  T* head(int64_t h) const {
    return reinterpret_cast<T*>(numbers) + h * head_stride;
  }

  char* numbers;
  at::ScalarType type;
  int64_t heads, dim, block_size, block_stride, head_stride, vector_stride;
};

// Queries, keys, values or outputs of the tokens of a step, [N, heads, dim], of any type.
template <typename Byte>
struct Heads {
  Byte* numbers;
  int64_t token_stride, head_stride;
  template <typename T>
  auto* at(int64_t token, int64_t head) const {
    using Number = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    return reinterpret_cast<Number*>(numbers) + token * token_stride + head * head_stride;
  }
};

// Some query rows of one KV head of one row of the batch.
struct Part {
  int64_t row, head;
  QueryRows rows;
};

// A piece of work: some query rows over some splits of their sequence. If these are not all splits of the sequence, it
// leaves partial sums, one per query row.
struct Item {
  Part part;
  int64_t begin, end;  // splits
  int64_t partial;     // index of the first partial sum; negative: the piece covers all splits and leaves none
};

// A piece of work: merges the partial sums that some query rows have for the splits of their sequence, in the order of
// the splits.
struct Merge {
  Part part;
  int64_t splits, partial;
};

// The pieces of work of attention over some rows of a step; layers with the same mask and number of heads share one
// Plan.
struct Plan {
  Mask mask;  // what the rows have in common; see Rows::mask
  std::vector<Item> items;
  std::vector<Merge> merges;
  int64_t partials = 0;
};

// The arguments of attention of one layer over the rows of one strategy. First all items of the plan are computed, in
// any order, then all merges.
struct AttentionCall {
  const Rows& rows;
  const Plan& plan;
  Memory k, v;
  Scores scores;
  const float* sink_logits;  // [query heads], or null
  int64_t group;             // query heads that share a KV head
  Heads<const char> q;
  Heads<char> out;
  float* partials;  // AttentionKernels::width numbers for each
};

// The attention kernels for one type of queries and one type of stored keys and values.
struct AttentionKernels {
  int64_t most_rows;                // of a part
  int64_t (*width)(int64_t v_dim);  // number of float32 values in a partial sum
  // Computes an item; `next` is the item that this thread computes afterwards, or null if there is none.
  void (*item)(const AttentionCall&, const Item&, const Item* next);
  void (*merge)(const AttentionCall&, const Merge&);
  // Writes token number `i` of a row, from `heads` heads of k and v, to its slot.
  void (*write)(const Memory& k_plane, const Memory& v_plane, const Rows&, int64_t heads, int64_t row, int64_t i,
                Heads<const char> k, Heads<const char> v);
};

// Throws unless the addresses of a step have the right types and fit each other, its rows have at most `tokens` tokens,
// and all of them are within a store of `blocks` blocks. Layers of split heads have `split_heads` heads; 0: heads are
// not split.
void expect_rows(const char* operation, const Addresses& at, int64_t split_heads, int64_t blocks, int64_t tokens);
// Throws unless a plane (the keys or the values of a layer) has this number of heads, this dimension and this block
// size.
void expect_plane(const char* operation, const Memory& plane, int64_t heads, int64_t dim, int64_t block_size);

AttentionKernels attention_kernels(at::ScalarType q, at::ScalarType kept);  // throws if no kernels have these types
Plan plan(const Rows& rows, int64_t kv_heads, int64_t group, const Mask& mask, int64_t most);
const Item* next_of(const Plan& plan, int64_t i);  // null: there is none
Mask mask_of(const Rows& rows, int64_t model_window, int64_t window);

}  // namespace kvmux

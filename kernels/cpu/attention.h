// Attention over the KV memory of a step, cut into pieces of work that threads share. Knows no weights.
#pragma once

#include <vector>

#include "addresses.h"
#include "kv_tiles.h"
#include "online_softmax.h"

namespace kvmux {

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
  // Returns the item after item number i; null if there is none.
  const Item* next(int64_t i) const { return i + 1 < std::ssize(items) ? &items[i + 1] : nullptr; }

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
  Plane k, v;
  Scores scores;
  const float* sink_logits;  // [query heads], or null
  int64_t group;             // query heads that share a KV head
  Heads<const char> q;
  Heads<char> out;
  float* partials;        // AttentionKernels::partial_size numbers for each
  Heads<float> lse = {};  // [N, query heads], or null: the logarithms of the sums of exp(score); see Ops.attend
};

// The attention kernels for one type of queries, one format of stored keys and one of stored values.
struct AttentionKernels {
  int64_t most_rows;                       // of a part
  int64_t (*partial_size)(int64_t v_dim);  // number of float32 values in a partial sum
  // Computes an item; `next` is the item that this thread computes afterwards, or null if there is none.
  void (*attend)(const AttentionCall&, const Item&, const Item* next);
  void (*merge)(const AttentionCall&, const Merge&);
  // Writes token number `i` of a row, from `heads` heads of k and v, to its slot.
  void (*write)(const Plane& k_plane, const Plane& v_plane, const Rows&, int64_t heads, int64_t row, int64_t i,
                Heads<const char> k, Heads<const char> v);
};

// Returns the kernels for queries of a type, and for formats of keys and of values; throws if there are none.
AttentionKernels attention_kernels(at::ScalarType q, at::ScalarType k, at::ScalarType v);
// Cuts the attention of a step into pieces of work for threads: a chunk of a prompt by queries, with at most
// `most_rows` query rows in a piece; a single query, whose sequence may be long, by those splits of its sequence that
// it sees.
Plan make_plan(const Rows& rows, int64_t kv_heads, int64_t group, const Mask& mask, int64_t most_rows);

}  // namespace kvmux

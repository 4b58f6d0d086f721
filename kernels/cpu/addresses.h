// Where the keys and values of a step are: the addresses of its rows (`kernels.types.Slots`), the planes of a store,
// and checks of both. Knows no attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "check.h"
#include "slots.h"

namespace kvmux {

constexpr int64_t NO_WINDOW = int64_t{1} << 40;  // tokens in the window of a layer without one; as in decoder.py

// What `kernels.types.Slots` says of the sizes of a step: other backends choose kernels and memory by these numbers, so
// they are checked here, too, although no kernel here reads them.
struct StepSizes {
  int64_t num_decode, max_q, max_kv;
};

// Returns the numbers of each vector of a plane: of those of 4 bits, a byte of the tensor has two.
inline int64_t vector_dim(const at::Tensor& plane) {
  return plane.scalar_type() == at::kByte ? 2 * plane.size(3) : plane.size(3);
}

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
    if (!has_window_starts(common.model_window)) return common;
    common.window_start = window_starts_ + first(row) * heads_ + (heads_ > 1 ? head : 0);
    common.start = start(row, head);
    common.stride = heads_;
    return common;
  }
  // Returns whether the addresses say where the window of a layer begins; not if the layer has none.
  bool has_window_starts(int64_t model_window) const { return window_starts_ != nullptr && model_window != NO_WINDOW; }

  const int64_t count;
  const Layout layout;

 private:
  int64_t own(int64_t row, int64_t head) const { return heads_ > 1 ? row * heads_ + head : row; }

  int64_t heads_;  // 1: all heads have the same addresses
  const int32_t* table_;
  int64_t width_;
  const int32_t *table_rows_, *first_, *starts_, *window_starts_;
};

// A plane of a store: the keys or the values of one layer in all blocks, [blocks, heads, block size, dim], in a format
// (kv_formats.h).
struct Plane {
  explicit Plane(const at::Tensor& t, bool is_rotated = false)
      : bytes(static_cast<char*>(t.mutable_data_ptr())), format(t.scalar_type()), rotated(is_rotated), heads(t.size(1)),
        dim(vector_dim(t)), block_size(t.size(2)), block_stride(t.stride(0) * t.itemsize()),
        head_stride(t.stride(1) * t.itemsize()), vector_stride(t.stride(2) * t.itemsize()) {}

  char* head(int64_t h) const { return bytes + h * head_stride; }
  // Returns what is subtracted from the vectors of a head of the layer before they are stored; null: nothing.
  const float* center(int64_t h) const { return centers == nullptr ? nullptr : centers + h * dim; }

  char* bytes;
  at::ScalarType format;
  bool rotated;  // whether vectors are rotated before they are stored
  int64_t heads, dim, block_size;
  int64_t block_stride, head_stride, vector_stride;  // bytes
  const float* centers = nullptr;                    // [heads of the layer, dim]; null: there are none
};

// Throws unless the addresses of a step have the right types and fit each other, its rows have at most `tokens` tokens,
// and all of them are within a store of `blocks` blocks. Layers of split heads have `split_heads` heads; 0: heads are
// not split.
void expect_rows(const char* operation, const Addresses& at, int64_t split_heads, int64_t blocks, int64_t tokens);
// Throws unless a tensor can be a plane, of one of these types.
void expect_plane_tensor(const char* operation, const char* name, const at::Tensor& t, Types types = KV_TYPES);
// Throws unless the tensors are the planes of one layer, of these types.
void expect_planes(const char* operation, const at::Tensor& k, const at::Tensor& v, Types types = KV_TYPES);
// Returns the centers of a layer's keys, null if there are none. Throws unless they have these sizes, and are dense.
const float* centers_of(const char* operation, const std::optional<at::Tensor>& centers, int64_t heads, int64_t dim);
// Throws unless a plane has this number of heads, this dimension and this block size.
void expect_plane(const char* operation, const Plane& plane, int64_t heads, int64_t dim, int64_t block_size);

// Returns what the masks of all rows have in common in a layer with the window `model_window` whose strategy lets
// queries see the sinks and the latest `window` tokens.
Mask mask_of(const Rows& rows, int64_t model_window, int64_t window);

}  // namespace kvmux

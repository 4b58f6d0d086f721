// Checks of the addresses of a step and of the planes of a store; see addresses.h.
#include "addresses.h"

#include <ATen/core/Formatting.h>

#include <algorithm>
#include <limits>

namespace kvmux {
namespace {

using at::Tensor;

constexpr int64_t MAX_INDEX = std::numeric_limits<int32_t>::max();  // of a token, as addresses are int32

// Throws unless the window of each token of a row begins at an index from 0 to the token's own.
void expect_window_starts(const char* operation, const Rows& rows, int64_t row, int64_t head) {
  const Mask mask = rows.mask({}, row, head);
  bool ordered = true;
  for (int64_t i = 0; i < rows.tokens(row); ++i) {
    const int64_t index = rows.start(row, head) + i, oldest = mask.oldest_of(index);
    ordered &= 0 <= oldest && oldest <= index;
  }
  TORCH_CHECK_VALUE(ordered, operation, ": window_start of row ", row, " must be from 0 to the index of each token");
}

// Throws unless the tokens of a row that is not padding have slots in a store of `blocks` blocks.
void expect_slots(const char* operation, const Addresses& at, const Rows& rows, int64_t row, int64_t head,
                  int64_t blocks) {
  const Layout& layout = at.layout;
  const int64_t start = rows.start(row, head), n = rows.tokens(row);
  TORCH_CHECK_VALUE(start + n <= at.sizes.max_kv, operation, ": row ", row, " has tokens up to index ", start + n - 1,
                    ", which must be below max_kv=", at.sizes.max_kv);
  const int64_t slots = at.table.size(1) * layout.block_size;
  const int64_t used = layout.ring ? layout.sinks + layout.ring : start + n;
  const int64_t in_ring = start + n - std::max(start, layout.sinks);
  TORCH_CHECK_VALUE(used <= slots && (layout.ring == 0 || in_ring <= layout.ring), operation, ": row ", row, " of ", n,
                    " tokens from ", start, " on does not fit ", slots, " slots and a ring of ", layout.ring);
  const int64_t used_blocks = (used + layout.block_size - 1) / layout.block_size;
  TORCH_CHECK_VALUE(are_indices(rows.blocks(row, head), used_blocks, blocks), operation,
                    ": the table has blocks for row ", row, " outside of the store, which has ", blocks);
}

// Throws unless all tokens of the rows are in blocks of the store, and begin their windows at an index up to their own.
void expect_addresses(const char* operation, const Addresses& at, int64_t heads, int64_t blocks) {
  const Rows rows(at);
  const auto* table_row = at.table_row.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < rows.count; ++row)
    for (int64_t head = 0; head < heads; ++head) {
      const bool padding = rows.start(row, head) < 0;
      TORCH_CHECK_VALUE(padding == rows.is_padding(row), operation, ": row ", row, " is padding for some heads only");
      if (padding) continue;
      const int64_t index = table_row[row * heads + head];
      TORCH_CHECK_VALUE(0 <= index && index < at.table.size(0), operation, ": row ", row, " has row ", index,
                        " of a table of ", at.table.size(0));
      expect_slots(operation, at, rows, row, head, blocks);
      if (at.window_start) expect_window_starts(operation, rows, row, head);
    }
}

// Throws unless the sizes of a step fit its rows, which have `tokens` tokens in all, and its table.
void expect_sizes(const char* operation, const Addresses& at, int64_t tokens) {
  const Rows rows(at);
  const auto& [num_decode, max_q, max_kv] = at.sizes;
  bool decode_first = 0 <= num_decode && num_decode <= rows.count,
       in_chunks = 0 <= max_q && max_q <= std::max<int64_t>(1, tokens);
  for (int64_t row = 0; row < rows.count; ++row) {
    decode_first &= row >= num_decode || rows.tokens(row) == 1;
    in_chunks &= rows.tokens(row) <= max_q;
  }
  TORCH_CHECK_VALUE(decode_first && in_chunks, operation, ": ", num_decode,
                    " rows must have one token, and the others at most max_q=", max_q, " of ", tokens);
  const int64_t most = at.layout.ring ? MAX_INDEX : at.table.size(1) * at.layout.block_size;
  TORCH_CHECK_VALUE(0 <= max_kv && max_kv <= most, operation, ": max_kv=", max_kv, " must be from 0 to ", most);
}

// Throws unless the tensors have the right types and sizes; `split_heads` as in expect_rows.
void expect_tensors(const char* operation, const Addresses& at, int64_t split_heads) {
  constexpr Types INTEGERS = only(at::kInt);
  const auto expect_by_head = [&](const char* name, const Tensor& tensor, int64_t size) {
    if (split_heads)
      expect(operation, name, tensor, INTEGERS, {size, split_heads});
    else
      expect(operation, name, tensor, INTEGERS, {size});
    TORCH_CHECK_VALUE(tensor.is_contiguous(), operation, ": ", name, " must be dense");
  };
  const int64_t rows = at.start.dim() > 0 ? at.start.size(0) : 0;
  expect_by_head("start", at.start, rows);
  expect_by_head("table_row", at.table_row, rows);
  expect(operation, "table", at.table, INTEGERS, {SOME, SOME});
  expect(operation, "q_start", at.q_start, INTEGERS, {rows + 1});
  if (at.window_start) expect_by_head("window_start", *at.window_start, ANY);
}

}  // namespace

void expect_rows(const char* operation, const Addresses& at, int64_t split_heads, int64_t blocks, int64_t tokens) {
  expect_tensors(operation, at, split_heads);
  const Layout& layout = at.layout;
  const auto is_size = [](int64_t n) { return 0 <= n && n <= MAX_INDEX; };
  TORCH_CHECK_VALUE(layout.block_size > 0 && is_size(layout.sinks) && is_size(layout.ring), operation, ": blocks of ",
                    layout.block_size, " slots, ", layout.sinks, " sinks and a ring of ", layout.ring);
  const int64_t rows = at.start.size(0);
  const auto* first = at.q_start.const_data_ptr<int32_t>();
  bool in_order = first[0] == 0 && first[rows] <= tokens;
  for (int64_t row = 0; row < rows; ++row) in_order &= first[row] <= first[row + 1];
  TORCH_CHECK_VALUE(in_order, operation, ": q_start must count from 0 up to ", tokens, " tokens at most, and is ",
                    at.q_start);
  if (at.window_start)
    TORCH_CHECK_VALUE(at.window_start->size(0) >= first[rows], operation, ": window_start has ",
                      at.window_start->size(0), " numbers for ", first[rows], " tokens");
  expect_sizes(operation, at, first[rows]);
  expect_addresses(operation, at, std::max<int64_t>(1, split_heads), blocks);
}

void expect_plane(const char* operation, const Plane& plane, int64_t heads, int64_t dim, int64_t block_size) {
  TORCH_CHECK_VALUE(plane.heads == heads && plane.dim == dim && plane.block_size == block_size, operation, ": ", heads,
                    " heads of ", dim, " in blocks of ", block_size, " do not fit a store of ", plane.heads,
                    " heads of ", plane.dim, " in blocks of ", plane.block_size);
}

const float* centers_of(const char* operation, const std::optional<Tensor>& centers, int64_t heads, int64_t dim) {
  if (!centers) return nullptr;
  expect(operation, "the centers of keys", *centers, only(at::kFloat), {heads, dim});
  TORCH_CHECK_VALUE(centers->is_contiguous(), operation, ": the centers of keys must be dense");
  return centers->const_data_ptr<float>();
}

void expect_plane_tensor(const char* operation, const char* name, const Tensor& t, Types types) {
  expect(operation, name, t, types, {ANY, SOME, SOME, SOME});
  TORCH_CHECK_VALUE(t.scalar_type() != at::kByte || vector_dim(t) % 8 == 0, operation, ": ", name,
                    " of 4 bits must have vectors of a multiple of 8 numbers, and has ", vector_dim(t));
}

void expect_planes(const char* operation, const Tensor& k, const Tensor& v, Types types) {
  expect_plane_tensor(operation, "the keys' memory", k, types);
  expect_plane_tensor(operation, "the values' memory", v, types);
  expect(operation, "the values' memory", v, types, {k.size(0), k.size(1), k.size(2), SOME});
}

Mask mask_of(const Rows& rows, int64_t model_window, int64_t window) {
  if (rows.has_window_starts(model_window)) return {window, model_window, window < NO_WINDOW ? rows.layout.sinks : 0};
  return {std::min(model_window, window), model_window, window < model_window ? rows.layout.sinks : 0};
}

}  // namespace kvmux

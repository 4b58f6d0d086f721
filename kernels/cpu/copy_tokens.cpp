// The operation `copy_tokens` for torch: copies the keys and values of one layer from slots to slots. Knows neither
// attention nor block tables.
#include <torch/library.h>

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include "addresses.h"
#include "dispatch.h"

namespace kvmux {
namespace {

using at::Tensor;

// Slot numbers [N] or, if each head has slots of its own, [N, heads].
struct SlotNumbers {
  explicit SlotNumbers(const Tensor& t)
      : numbers(t.const_data_ptr<int64_t>()), count(t.size(0)), columns(t.dim() == 2 ? t.size(1) : 1),
        token_stride(t.stride(0)) {}

  int64_t at(int64_t token, int64_t head) const { return numbers[token * token_stride + (columns > 1 ? head : 0)]; }

  const int64_t* numbers;
  int64_t count, columns, token_stride;
};

struct SlotInBlock {
  int64_t block, offset;
};

// The slots of all tokens, divided into blocks and offsets, since a division takes longer than most of a copy.
class SlotsInBlocks {
 public:
  SlotsInBlocks(const SlotNumbers& slots, int64_t block_size) : columns_(slots.columns) {
    slots_.reserve(slots.count * slots.columns);
    for (int64_t i = 0; i < slots.count; ++i)
      for (int64_t head = 0; head < columns_; ++head) {
        const int64_t slot = slots.at(i, head), block = slot / block_size;
        slots_.push_back({block, slot - block * block_size});
      }
  }

  const SlotInBlock& at(int64_t token, int64_t head) const {
    return slots_[token * columns_ + (columns_ > 1 ? head : 0)];
  }
  const std::vector<SlotInBlock>& all() const { return slots_; }

  // Returns how many tokens from `first` on, before `end`, have consecutive slots within one block.
  int64_t run(int64_t first, int64_t end, int64_t head) const {
    const SlotInBlock& begin = at(first, head);
    int64_t n = 1;
    while (first + n < end && at(first + n, head).block == begin.block &&
           at(first + n, head).offset == begin.offset + n)
      ++n;
    return n;
  }

 private:
  int64_t columns_;
  std::vector<SlotInBlock> slots_;
};

// A set of slot numbers: a hash table with linear probing, at most half full.
class SlotSet {
 public:
  explicit SlotSet(int64_t count)
      : slots_(std::bit_ceil(static_cast<uint64_t>(2 * count + 2)), EMPTY),
        shift_(64 - std::bit_width(slots_.size() - 1)) {}

  // Adds a slot; returns false if it is in the set already.
  bool add(int64_t slot) {
    int64_t& place = slots_[find(slot)];
    if (place == slot) return false;
    place = slot;
    return true;
  }
  bool has(int64_t slot) const { return slots_[find(slot)] == slot; }

 private:
  static constexpr int64_t EMPTY = -1;

  size_t find(int64_t slot) const {
    size_t i = (static_cast<uint64_t>(slot) * 0x9E3779B97F4A7C15u) >> shift_;
    while (slots_[i] != slot && slots_[i] != EMPTY) i = (i + 1) & (slots_.size() - 1);
    return i;
  }

  std::vector<int64_t> slots_;
  int shift_;
};

// Throws unless all slots are below `end`.
void expect_inside(const char* name, const SlotNumbers& slots, int64_t end) {
  bool inside = true;  // no branch for each number, so that the compiler compares them in vectors
  for (int64_t i = 0; i < slots.count; ++i)
    for (int64_t head = 0; head < slots.columns; ++head)
      inside &= static_cast<uint64_t>(slots.at(i, head)) < static_cast<uint64_t>(end);
  TORCH_CHECK_VALUE(inside, "copy_tokens: ", name, " must be slots from 0 to ", end - 1);
}

// Returns whether a slot of a head is both read and written. Throws if one is written twice.
bool overlap(const SlotNumbers& src, const SlotNumbers& dst) {
  bool once = true, overlapping = false;
  for (int64_t head = 0; head < std::max(src.columns, dst.columns); ++head) {
    SlotSet written(dst.count);
    for (int64_t i = 0; i < dst.count; ++i) once &= written.add(dst.at(i, head));
    for (int64_t i = 0; i < src.count; ++i) overlapping |= written.has(src.at(i, head));
  }
  TORCH_CHECK_VALUE(once, "copy_tokens: a slot is written twice");
  return overlapping;
}

// Throws if two different blocks have pages in common: a block is `pages` pages, and its number is that of the first.
void expect_whole_blocks(const SlotsInBlocks& src, const SlotsInBlocks& dst, int64_t pages) {
  if (pages == 1) return;
  std::vector<int64_t> blocks;
  for (const SlotsInBlocks* slots : {&src, &dst})
    for (const SlotInBlock& slot : slots->all())
      if (blocks.empty() || blocks.back() != slot.block) blocks.push_back(slot.block);
  std::ranges::sort(blocks);
  for (size_t i = 1; i < blocks.size(); ++i)
    TORCH_CHECK_VALUE(blocks[i] == blocks[i - 1] || blocks[i] - blocks[i - 1] >= pages, "copy_tokens: blocks ",
                      blocks[i - 1], " and ", blocks[i], " overlap, as a block has ", pages, " pages");
}

// One head of the keys or the values of a layer, as bytes. A vector includes the scales that follow its numbers.
struct HeadBytes {
  HeadBytes(const Plane& plane, int64_t head) {
    begin = plane.head(head);
    block_stride = plane.block_stride;
    vector = plane.vector_stride;
  }

  char* at(const SlotInBlock& slot) const { return begin + slot.block * block_stride + slot.offset * vector; }

  void copy(const SlotInBlock& from, const SlotInBlock& to, int64_t n) const {
    std::memcpy(at(to), at(from), n * vector);
  }
  void prefetch(const SlotInBlock& slot) const {
    constexpr int64_t LINE = 64;  // bytes
    for (int64_t i = 0; i < vector; i += LINE) __builtin_prefetch(at(slot) + i);
  }

  char* begin;
  int64_t block_stride, vector;
};

// Copies the tokens begin .. end - 1 of a head, runs of tokens with consecutive slots at once. Vectors that are copied
// soon are prefetched, as the hardware foresees no jumps between blocks.
void copy_head(const HeadBytes& keys, const HeadBytes& values, int64_t head, const SlotsInBlocks& from,
               const SlotsInBlocks& to, int64_t begin, int64_t end) {
  constexpr int64_t AHEAD = 16;  // tokens
  for (int64_t i = begin, n; i < end; i += n) {
    n = to.run(i, i + from.run(i, end, head), head);
    for (int64_t next = i + AHEAD; next < std::min(i + AHEAD + n, end); ++next)
      for (const HeadBytes* plane : {&keys, &values}) {
        plane->prefetch(from.at(next, head));
        plane->prefetch(to.at(next, head));
      }
    keys.copy(from.at(i, head), to.at(i, head), n);
    values.copy(from.at(i, head), to.at(i, head), n);
  }
}

// Moves tokens whose slots overlap: all are read into dense memory before any is written.
void move_tokens(const Plane& keys, const Plane& values, const SlotsInBlocks& from, const SlotsInBlocks& to,
                 int64_t count) {
  const auto planes_of = [&](int64_t head) { return std::array{HeadBytes(keys, head), HeadBytes(values, head)}; };
  const int64_t vectors = planes_of(0)[0].vector + planes_of(0)[1].vector;  // bytes of a token in a head
  const auto scratch = std::make_unique_for_overwrite<char[]>(keys.heads * count * vectors);
  const auto pass = [&](const SlotsInBlocks& slots, auto copy) {  // copy(vectors in the store, in scratch, bytes)
    parallel_over_rows(count, keys.heads * (keys.dim + values.dim), [&](int64_t begin, int64_t end) {
      for (int64_t head = 0; head < keys.heads; ++head) {
        char* dense = scratch.get() + head * count * vectors;
        for (const HeadBytes& plane : planes_of(head)) {
          for (int64_t i = begin, n; i < end; i += n) {
            n = slots.run(i, end, head);
            copy(plane.at(slots.at(i, head)), dense + i * plane.vector, n * plane.vector);
          }
          dense += count * plane.vector;
        }
      }
    });
  };
  pass(from, [](const char* stored, char* dense, int64_t bytes) { std::memcpy(dense, stored, bytes); });
  pass(to, [](char* stored, const char* dense, int64_t bytes) { std::memcpy(stored, dense, bytes); });
}

void copy_tokens(const Tensor& k_plane, const Tensor& v_plane, const Tensor& src, const Tensor& dst,
                 int64_t pages_per_block) {
  expect_planes("copy_tokens", k_plane, v_plane, KV_TYPES | only(at::kDouble));
  const Plane keys(k_plane), values(v_plane);
  const auto expect_slots = [&](const char* name, const Tensor& slots, int64_t count) {
    if (slots.dim() == 2)
      expect("copy_tokens", name, slots, only(at::kLong), {count, keys.heads});
    else
      expect("copy_tokens", name, slots, only(at::kLong), {count});
  };
  expect_slots("src", src, ANY);
  expect_slots("dst", dst, src.size(0));
  if (src.size(0) == 0) return;
  const SlotNumbers read(src), written(dst);
  expect_inside("src", read, k_plane.size(0) * keys.block_size);
  expect_inside("dst", written, k_plane.size(0) * keys.block_size);
  const bool overlapping = overlap(read, written);
  const SlotsInBlocks from(read, keys.block_size), to(written, keys.block_size);
  expect_whole_blocks(from, to, pages_per_block);
  if (overlapping) return move_tokens(keys, values, from, to, read.count);
  parallel_over_rows(read.count, keys.heads * (keys.dim + values.dim), [&](int64_t begin, int64_t end) {
    for (int64_t head = 0; head < keys.heads; ++head)
      copy_head({keys, head}, {values, head}, head, from, to, begin, end);
  });
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) {
  library.def("copy_tokens(Tensor(a!) k_plane, Tensor(b!) v_plane, Tensor src, Tensor dst, int pages_per_block) -> ()",
              &kvmux::copy_tokens);
}

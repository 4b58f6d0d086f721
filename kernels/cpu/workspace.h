// Memory for the activations of a step. It grows to what the largest step so far needed, and stays that large.
// Does not know what is stored in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

namespace kvmux {

class Workspace {
 public:
  // Frees all memory that take() returned. Call it before each step.
  void clear() {
    if (pieces_.size() > 1)
      pieces_ = {at::empty({needed_}, at::kByte)};  // one piece, so that a step of this size fits in it
    needed_ = used_ = 0;
  }

  // Returns memory for n numbers, aligned to a cache line.
  template <typename T>
  T* take(int64_t n) {
    const int64_t size = (n * static_cast<int64_t>(sizeof(T)) + LINE - 1) / LINE * LINE;
    if (pieces_.empty() || used_ + size > pieces_.back().numel()) {
      pieces_.push_back(at::empty({size}, at::kByte));
      used_ = 0;
    }
    char* const at = static_cast<char*>(pieces_.back().mutable_data_ptr()) + used_;
    used_ += size;
    needed_ += size;
    return reinterpret_cast<T*>(at);
  }

 private:
  static constexpr int64_t LINE = 64;  // bytes, as at::empty aligns
  std::vector<at::Tensor> pieces_;
  int64_t needed_ = 0, used_ = 0;  // bytes taken since the last clear(); bytes taken from the last piece
};

}  // namespace kvmux

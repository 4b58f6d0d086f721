// Memory for what a step keeps between its phases: as much as the largest step so far needed, and from then on flat.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

namespace kvmux {

class Workspace {
 public:
  // All that was taken is free again. Called before the first.
  void clear() {
    if (pieces_.size() > 1) pieces_ = {at::empty({needed_}, at::kByte)};  // the next step of that kind finds it in one
    needed_ = used_ = 0;
  }

  // n numbers, at the beginning of a line of the cache.
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
  int64_t needed_ = 0, used_ = 0;  // of all, and of the last piece
};

}  // namespace kvmux

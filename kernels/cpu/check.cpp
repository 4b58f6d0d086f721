// The messages of failed checks; see check.h.
#include "check.h"

#include <sstream>

namespace kvmux {

namespace {

void write_types(std::ostream& words, Types types) {
  const char* between = "";
  for (int type = 0; type < static_cast<int>(at::ScalarType::NumOptions); ++type) {
    if (!(types >> type & 1)) continue;
    words << between << c10::getDtypeNames(static_cast<at::ScalarType>(type)).first;
    between = " or ";
  }
}

void write_sizes(std::ostream& words, std::initializer_list<int64_t> sizes) {
  const char* between = "";
  words << " [";
  for (const int64_t size : sizes) {
    words << between;
    if (size >= 0)
      words << size;
    else
      words << (size == SOME ? "at least 1" : "any");
    between = ", ";
  }
  words << ']';
}

}  // namespace

void refuse(const char* operation, const char* name, const at::Tensor& t, Types types,
            std::initializer_list<int64_t> sizes) {
  std::ostringstream words;
  words << operation << ": " << name << " must be ";
  write_types(words, types);
  write_sizes(words, sizes);
  words << " in the CPU's memory, dense in its last dimension, and is ";
  if (!t.defined()) {
    words << "None";
  } else {
    write_types(words, only(t.scalar_type()));
    words << ' ' << t.sizes();
    if (t.layout() == at::kStrided) words << " with strides " << t.strides();
    words << " on " << t.device();
  }
  TORCH_CHECK_VALUE(false, words.str());
}

void expect_indices(const char* operation, const char* name, const at::Tensor& t, int64_t end) {
  const auto* numbers = t.const_data_ptr<int64_t>();
  if (are_indices(numbers, t.numel(), end)) return;
  for (int64_t i = 0, n = t.numel(); i < n; ++i)
    TORCH_CHECK_VALUE(0 <= numbers[i] && numbers[i] < end, operation, ": ", name, " must be from 0 to ", end - 1,
                      ", and there is ", numbers[i]);
}

}  // namespace kvmux

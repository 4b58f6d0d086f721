// Returns to Python whether the system lets this process use the instructions that this library is compiled for; called
// before anything else of the library.
#include <torch/library.h>

#include "amx.h"

namespace kvmux {
namespace {

bool usable() {
#ifdef __AMX_TILE__
  return tiles_permitted();
#else
  return true;
#endif
}

}  // namespace
}  // namespace kvmux

TORCH_LIBRARY_FRAGMENT(KVMUX_LIBRARY, library) { library.def("usable() -> bool", &kvmux::usable); }

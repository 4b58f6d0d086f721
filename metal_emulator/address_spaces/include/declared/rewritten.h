// Definitions that ../../rewriting.py writes into a source instead of Metal that clang's C++ does not have.
#pragma once
#include "words.h"

// Constructors and assignments, inserted into every struct S: Metal copies structs from any address space, C++ only
// within the default one. `made` is `S() = default;` if S has no constructors, so that it can still be initialised with
// braces.
#define SPACES_STRUCT(S, made)                    \
  made S(const S&) = default;                     \
  S(const device S&) = default;                   \
  S(constant S&) = default;                       \
  S(const threadgroup S&) = default;              \
  S& operator=(const S&) = default;               \
  S& operator=(const device S&);                  \
  S& operator=(constant S&);                      \
  S& operator=(const threadgroup S&);

namespace metal {
namespace spaces {

template <class P>
struct space_of {
  enum { number = -1 };
};
template <class T>
struct space_of<thread T*> {
  enum { number = 0 };
};
template <class T>
struct space_of<device T*> {
  enum { number = 1 };
};
template <class T>
struct space_of<constant T*> {
  enum { number = 2 };
};
template <class T>
struct space_of<threadgroup T*> {
  enum { number = 3 };
};

template <class T>
struct is_thread {
  enum { value = int(space_of<__remove_reference_t(T)*>::number) == 0 };
};

// Stands for a cast `(To)from`, and refuses to change the address space of a pointer. A number has no address space,
// and may be converted to a pointer.
template <class To, class From>
To cast(From) {
  static_assert(int(space_of<From>::number) < 0 || int(space_of<From>::number) == int(space_of<To>::number),
                "a cast cannot change the address space");
  return nullptr;
}

// Returns a reference that stands for a threadgroup variable within a function, which C++ does not have.
template <class T>
threadgroup T& variable() {
  static_assert(__is_trivially_constructible(T), "a threadgroup variable has no initialiser, its type's members neither");
  return *(threadgroup T*)nullptr;
}

}  // namespace spaces
}  // namespace metal

// Metal's words for address spaces and functions, as C++. `thread` is the default address space of C++.
#pragma once
#include "shared/words.h"

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define vertex
#define fragment
#define METAL_FUNC inline

typedef __bf16 bfloat;

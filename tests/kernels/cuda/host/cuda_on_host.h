// Runs the threads of a CUDA kernel on one thread of the CPU, each as a fiber of the Metal emulator, so that kernels
// can be tested where there is no GPU. Has what our kernels use of CUDA, no more.
#pragma once
#include <cassert>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "fiber.h"

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __shared__ static  // threadgroups run one after the other

struct int2 {
  int x, y;
};
struct uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
using std::exp;
using std::rint;

static uint3 threadIdx, blockIdx, blockDim;

namespace host {

constexpr unsigned MOST = 1024, WARP = 32;
enum Place { RUNNING, AT_WARP, AT_BLOCK, DONE };

static emulator::Fibers fibers;
static emulator::Registers scheduler;
static emulator::Fiber* threads[MOST];
static Place places[MOST];
static float exchanged[2][MOST];  // what lanes give to others; in turn, as some lanes still read the last exchange
static unsigned turns[MOST];
static unsigned current, count;
static void (*body)(void*);
static void* arguments;

inline void wait(Place place) {
  places[current] = place;
  emulator::switch_to(threads[current]->registers, scheduler);
}

static void run_thread() {
  for (;;) {  // a fiber that is taken again goes on here
    body(arguments);
    wait(DONE);
  }
}

// Lets threads [begin, end) that wait at a place go on, if all of them wait there or are done.
inline bool release(unsigned begin, unsigned end, Place place) {
  bool found = false;
  for (unsigned i = begin; i < end; i++) {
    if (places[i] != place && places[i] != DONE) return false;
    found = found || places[i] == place;
  }
  for (unsigned i = begin; found && i < end; i++)
    if (places[i] == place) places[i] = RUNNING;
  return found;
}

static void run_block() {
  fibers.reset(run_thread);
  for (unsigned i = 0; i < count; i++) {
    threads[i] = fibers.take();
    places[i] = RUNNING;
  }
  for (bool goes_on = true; goes_on;) {
    for (unsigned i = 0; i < count; i++) {
      if (places[i] != RUNNING) continue;
      current = i;
      threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
      emulator::switch_to(scheduler, threads[i]->registers);
    }
    goes_on = false;
    for (unsigned i = 0; i < count; i += WARP) goes_on |= release(i, i + WARP < count ? i + WARP : count, AT_WARP);
    goes_on |= release(0, count, AT_BLOCK);
  }
  for (unsigned i = 0; i < count; i++) assert(places[i] == DONE && "threads wait for each other for ever");
}

template <typename... P, std::size_t... I>
void run(void (*kernel)(P...), std::index_sequence<I...>, const unsigned* groups, const unsigned* size, void** given) {
  auto call = [&] { kernel(*static_cast<std::remove_const_t<P>*>(given[I])...); };
  body = [](void* to) { (*static_cast<decltype(call)*>(to))(); };
  arguments = &call;
  blockDim = {size[0], size[1], size[2]};
  count = size[0] * size[1] * size[2];
  for (unsigned z = 0; z < groups[2]; z++)
    for (unsigned y = 0; y < groups[1]; y++)
      for (unsigned x = 0; x < groups[0]; x++) {
        blockIdx = {x, y, z};
        run_block();
      }
}

// Launches a kernel with the parameters whose addresses are given, as cuLaunchKernel does.
template <typename... P>
void launch(void (*kernel)(P...), const unsigned* groups, const unsigned* size, void** given) {
  run(kernel, std::index_sequence_for<P...>(), groups, size, given);
}

// Gives a value to the lanes of the warp, and returns that of another lane.
inline float exchange(float value, unsigned mask) {
  const unsigned turn = turns[current]++ % 2, own = current;
  exchanged[turn][own] = value;
  wait(AT_WARP);
  return exchanged[turn][own ^ mask];
}

}  // namespace host

inline void __syncthreads() { host::wait(host::AT_BLOCK); }
inline float __shfl_xor_sync(unsigned, float value, int mask) { return host::exchange(value, mask); }
inline bool __all_sync(unsigned, bool value) {
  float all = value;
  for (int mask = 16; mask > 0; mask /= 2) all = all * host::exchange(all, mask);
  return all != 0.0f;
}

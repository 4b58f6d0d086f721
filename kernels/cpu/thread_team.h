// A team of threads that work through phases together, with a barrier after each phase, in one parallel region of
// torch. Knows no operation.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace kvmux {

// The index of a thread in its team, from 0.
using Member = int64_t;

class Team {
 public:
  // Calls work(team, member) in each of `threads` threads of torch at once, or of fewer if torch has fewer. `work` must
  // not throw: the other threads would wait forever.
  template <typename Work>
  static void run(int64_t threads, const Work& work) {
    threads = std::clamp<int64_t>(threads, 1, max_threads());
    Team team(threads);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) { work(team, team.join(end - begin)); });
  }

  static int64_t max_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

  int64_t size() const { return size_; }

  // Runs one phase: work(0) ... work(n - 1), shared among the threads. Every thread must call this, and no call returns
  // before all of the work is done. Each thread first does a range of its own, in order, as memory is read fastest that
  // way; then it takes work from the ranges of other threads.
  template <typename Work>
  void share(Member member, int64_t n, const Work& work) {
    const int64_t threads = size_;
    for (int64_t i = 0; i < threads; ++i) {
      const int64_t owner = (member + i) % threads, begin = n * owner / threads, end = n * (owner + 1) / threads;
      std::atomic<int64_t>& done = done_[owner].count;
      for (int64_t at; (at = begin + done.fetch_add(1, std::memory_order_relaxed)) < end;) work(at);
    }
    barrier();
  }

 private:
  static constexpr int64_t APART = 64;  // bytes between counters, so that threads write to different cache lines
  struct alignas(APART) Count {
    std::atomic<int64_t> count{0};
  };

  explicit Team(int64_t threads) : missing_(threads), done_(threads) {}

  // Waits until all threads have joined, and returns this thread's number. Torch may give several of the requested
  // pieces to one thread, so the team has as many members as threads join.
  Member join(int64_t pieces) {
    const Member member = size_.fetch_add(1);
    missing_.fetch_sub(pieces);
    wait([&] { return missing_.load(std::memory_order_acquire) == 0; });
    return member;
  }

  // Waits until all threads have arrived; the last one to arrive begins the next phase.
  void barrier() {
    std::atomic<int64_t>&phase = phase_.count, &arrived = arrived_.count;
    const int64_t now = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived.store(0, std::memory_order_relaxed);
      for (Count& done : done_) done.count.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
    } else {
      wait([&] { return phase.load(std::memory_order_acquire) != now; });
    }
  }

  // Waits until done() returns true: spins, as phases are short, and yields the processor only after a long wait, when
  // another thread seems to need it.
  template <typename Done>
  static void wait(const Done& done) {
    constexpr int64_t MAX_SPINS = 20000;
    for (int64_t i = 0; !done(); ++i) {
      if (i > MAX_SPINS) std::this_thread::yield();
#ifdef __SSE2__
      _mm_pause();
#endif
    }
  }

  std::atomic<int64_t> missing_, size_{0};
  std::vector<Count> done_;  // of each thread's range
  Count arrived_, phase_;
};

}  // namespace kvmux

// Threads that go through a piece of work together, phase by phase, within one parallel region. Knows no operation.
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

// Which of the threads this is, from 0 on.
using Member = int64_t;

class Team {
 public:
  // Calls pass(team, member) in `threads` of torch's threads at once, or in fewer if there are no more. Nothing that a
  // pass does may throw: the others would wait for it.
  template <typename DecoderForward>
  static void run(int64_t threads, const DecoderForward& pass) {
    threads = std::clamp<int64_t>(threads, 1, most());
    Team team(threads);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) { pass(team, team.join(end - begin)); });
  }

  static int64_t most() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

  int64_t size() const { return size_; }

  // A phase: work(0) ... work(n - 1). All threads call it, and nobody returns before all is done. Each has a stretch of
  // its own, in order, as memory is read fastest that way; who is done with it helps the others with theirs.
  template <typename Work>
  void share(Member member, int64_t n, const Work& work) {
    const int64_t threads = size_;
    for (int64_t i = 0; i < threads; ++i) {
      const int64_t whose = (member + i) % threads, begin = n * whose / threads, end = n * (whose + 1) / threads;
      std::atomic<int64_t>& done = done_[whose].count;
      for (int64_t at; (at = begin + done.fetch_add(1, std::memory_order_relaxed)) < end;) work(at);
    }
    barrier();
  }

 private:
  static constexpr int64_t APART = 64;  // bytes: what threads write does not share a line
  struct alignas(APART) Count {
    std::atomic<int64_t> count{0};
  };

  explicit Team(int64_t threads) : missing_(threads), done_(threads) {}

  // Torch may hand several of the pieces asked for to one thread: the team is as large as the threads that come.
  Member join(int64_t pieces) {
    const Member member = size_.fetch_add(1);
    missing_.fetch_sub(pieces);
    wait([&] { return missing_.load(std::memory_order_acquire) == 0; });
    return member;
  }

  // Who comes last begins the next phase.
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

  // Phases are short, so the processor is given up only where somebody else seems to need it.
  template <typename Done>
  static void wait(const Done& done) {
    constexpr int64_t PATIENCE = 20000;  // looks
    for (int64_t i = 0; !done(); ++i) {
      if (i > PATIENCE) std::this_thread::yield();
#ifdef __SSE2__
      _mm_pause();
#endif
    }
  }

  std::atomic<int64_t> missing_, size_{0};
  std::vector<Count> done_;  // of each thread's stretch
  Count arrived_, phase_;
};

}  // namespace kvmux

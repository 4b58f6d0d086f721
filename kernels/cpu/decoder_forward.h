// A step's way through a decoder's layers, one behind the other, as the threads of a team go it. A step of few tokens
// waits for the memory that weights lie in, so nothing is to come between reading one and the next: neither Python nor
// waking threads, which all take the way through caches that weights have just swept.
//
// The bits are those of the operations one by one. A phase is what all threads do before any goes on. Knows neither
// where weights come from nor who asked for the step.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "epilogue.h"
#include "gemm.h"
#include "layers.h"
#include "workspace.h"

namespace kvmux {

// A product and its bias.
struct Projection {
  std::unique_ptr<Gemm> weight;
  at::Tensor bias;  // padded float32; or undefined

  const float* biases() const { return bias.defined() ? bias.const_data_ptr<float>() : nullptr; }
};

// One layer's weights.
struct Layer {
  Projection qkv, o, gate_up, down;
  // Undefined: the model has none.
  at::Tensor norm, q_norm, k_norm, cos, sin, post_norm, next_norm, feed_norm, sink_logits;
  int64_t q_heads, kv_heads, head_dim, model_window;
  float eps;
  Scores scores;

  int64_t width() const { return norm.numel(); }
  int64_t heads() const { return q_heads + 2 * kv_heads; }
  bool sees_like(const Layer& other) const {
    return model_window == other.model_window && q_heads == other.q_heads && kv_heads == other.kv_heads;
  }
};

// One strategy's part of a step.
struct Slice {
  const Plan& plan(size_t layer) const { return plans[plan_of[layer]]; }

  Rows rows;
  const std::vector<Memory>&k, &v;  // of all layers
  AttentionKernels kernels;
  int64_t begin;                // number of its first token in the step
  std::vector<int64_t> row_of;  // its tokens
  std::vector<Plan> plans;      // one for each kind of layer
  std::vector<size_t> plan_of;  // by layer
};

// The norm of a row; its weight may be of another type than the row.
template <typename X>
void norm_row(const X* x, const at::Tensor& weight, float eps, X* y, int64_t n) {
  with_type(weight.scalar_type(),
            [&](auto of_weight) { rms_norm_row(x, weight.const_data_ptr<decltype(of_weight)>(), eps, y, n); });
}

// What a step keeps between its phases.
template <typename X>
struct Buffers {
  X *qkv, *mixed, *projected;     // [N, ...]
  X* gate_up;                     // the same, where products cannot take their rows in parts
  char *entered, *gated_entered;  // rows as products want them
  float *sums, *partials;
  X* lines;               // of each thread
  int64_t sums_of, line;  // numbers from one thread's to the next's
};

// Seconds that a step's operations took, as they are called in Python.
enum Span { ENTER, WRITE, ATTEND, LEAVE, FEED, SPANS };
using Seconds = std::array<double, SPANS>;

template <typename X>
class DecoderForward {
 public:
  DecoderForward(const std::vector<Layer>& layers, const std::vector<Slice>& slices, X* x, int64_t rows,
                 const int64_t* positions, Workspace& space, Seconds& seconds)
      : layers_(layers), slices_(slices), x_(x), n_(rows), positions_(positions), seconds_(seconds) {
    prepare(space);
  }

  void operator()(Team& team, Member member) const {
    for (size_t i = 0; i < layers_.size(); ++i) {
      timed(member, ENTER, [&] { enter(team, member, i); });
      timed(member, WRITE, [&] { write(team, member, i); });
      timed(member, ATTEND, [&] { attend(team, member, i); });
      timed(member, LEAVE, [&] { leave(team, member, layers_[i]); });
      timed(member, FEED, [&] { feed(team, member, layers_[i]); });
    }
    const int64_t d = layers_[0].width();
    team.share(member, n_, [&](int64_t row) { add_row(x_ + row * d, b_.projected + row * d, x_ + row * d, d); });
  }

 private:
  // One of the threads looks at the clock.
  template <typename Work>
  void timed(Member member, Span span, const Work& work) const {
    if (member != 0) return work();
    const auto began = std::chrono::steady_clock::now();
    work();
    seconds_[span] += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

  void prepare(Workspace& space) {
    int64_t qkv = 0, mixed = 0, width = 0, gated = 0, gate_up = 0, room = 0, gated_room = 0, partials = 0;
    for (const Layer& l : layers_) {
      qkv = std::max(qkv, l.heads() * l.head_dim);
      mixed = std::max(mixed, l.o.weight->width);
      width = std::max(width, l.width());
      gated = std::max(gated, l.down.weight->width);
      if (!gated_in_parts(l)) gate_up = std::max(gate_up, 2 * l.down.weight->width);
      for (const auto* p : {&l.qkv, &l.o, &l.gate_up}) room = std::max(room, p->weight->room(n_));
      gated_room = std::max(gated_room, l.down.weight->room(n_));
      for (const auto* p : {&l.qkv, &l.o, &l.gate_up, &l.down}) b_.sums_of = std::max(b_.sums_of, p->weight->sums(n_));
    }
    for (const Slice& slice : slices_) {
      int64_t most = 0;
      for (const Plan& plan : slice.plans) most = std::max(most, plan.partials);
      partials += most * slice.kernels.width(MAX_DIM);
    }
    b_.line = std::max(width, gated);
    const int64_t threads = Team::most();
    b_.qkv = space.take<X>(n_ * qkv);
    b_.mixed = space.take<X>(n_ * mixed);
    b_.projected = space.take<X>(n_ * width);
    b_.gate_up = space.take<X>(n_ * gate_up);
    b_.entered = space.take<char>(room);
    b_.gated_entered = space.take<char>(gated_room);
    b_.sums = space.take<float>(threads * b_.sums_of);
    b_.partials = space.take<float>(partials);
    b_.lines = space.take<X>(threads * b_.line);
  }

  // A product into rows of y [N, outputs].
  void multiply(Team& team, Member member, const Projection& p, char* entered, X* y) const {
    const int64_t outputs = p.weight->outputs;
    const auto put = [&](int64_t first, int64_t last, const float* sums, int64_t size) {
      put_rows(sums, size, first, last, p.biases(), y, n_, outputs);
    };
    p.weight->multiply(team, member, entered, n_, b_.sums + member * b_.sums_of, 0, put);
  }

  // x plus what the layer before adds, and queries, keys and values of its norm.
  void enter(Team& team, Member member, size_t i) const {
    const Layer& l = layers_[i];
    const int64_t d = l.width();
    X* const line = b_.lines + member * b_.line;
    team.share(member, n_, [&](int64_t row) {
      X* x = x_ + row * d;
      if (i > 0) add_row(x, b_.projected + row * d, x, d);
      norm_row(x, l.norm, l.eps, line, d);
      l.qkv.weight->enter(b_.entered, n_, line, row);
    });
    multiply(team, member, l.qkv, b_.entered, b_.qkv);
  }

  // Queries and keys at their positions; keys and values into their slots.
  void write(Team& team, Member member, size_t i) const {
    const Layer& l = layers_[i];
    const int64_t width = l.heads() * l.head_dim, turning = l.q_heads + l.kv_heads;
    team.share(member, n_, [&](int64_t row) {
      X* const heads = b_.qkv + row * width;
      for (int64_t h = 0; h < turning; ++h) {
        X* const head = heads + h * l.head_dim;
        if (l.q_norm.defined()) norm_row(head, h < l.q_heads ? l.q_norm : l.k_norm, l.eps, head, l.head_dim);
        if (!l.cos.defined()) continue;
        const int64_t half = l.cos.size(1), at = positions_[row] * l.cos.stride(0);
        rope_row(head, l.cos.const_data_ptr<float>() + at, l.sin.const_data_ptr<float>() + at, head, half);
      }
      keep(i, row, heads + l.q_heads * l.head_dim, heads + turning * l.head_dim);
    });
  }

  void keep(size_t i, int64_t token, const X* k, const X* v) const {
    const Slice& slice = slice_of(token);
    const int64_t own = token - slice.begin, row = slice.row_of[own], first = slice.rows.first(row),
                  dim = layers_[i].head_dim;
    if (slice.rows.idle(row)) return;
    const auto heads = [&](const X* x) {
      return Heads<const char>{reinterpret_cast<const char*>(x), /*token_stride=*/0, dim};
    };
    slice.kernels.write(slice.k[i], slice.v[i], slice.rows, row, own - first, heads(k), heads(v));
  }

  const Slice& slice_of(int64_t token) const {
    size_t s = slices_.size() - 1;
    while (slices_[s].begin > token) --s;
    return slices_[s];
  }

  // All slices' attention into `mixed`.
  void attend(Team& team, Member member, size_t i) const {
    int64_t items = 0, merges = 0;
    for (const Slice& slice : slices_) {
      const Plan& plan = slice.plan(i);
      items += plan.items.size();
      merges += plan.merges.size();
    }
    team.share(member, items, [&](int64_t n) {
      const Slice& slice = find(i, n, &Plan::items);
      const Plan& plan = slice.plan(i);
      slice.kernels.item(call_of(slice, i), plan.items[n], next_of(plan, n));
    });
    if (merges == 0) return;
    team.share(member, merges, [&](int64_t n) {
      const Slice& slice = find(i, n, &Plan::merges);
      slice.kernels.merge(call_of(slice, i), slice.plan(i).merges[n]);
    });
  }

  // Whose piece number n of all slices is; n becomes the slice's own number.
  template <typename Pieces>
  const Slice& find(size_t i, int64_t& n, Pieces Plan::* pieces) const {
    size_t s = 0;
    for (int64_t size; n >= (size = (slices_[s].plan(i).*pieces).size()); ++s) n -= size;
    return slices_[s];
  }

  AttentionCall call_of(const Slice& slice, size_t i) const {
    const Layer& l = layers_[i];
    const int64_t width = l.heads() * l.head_dim, out = l.q_heads * l.head_dim;
    float* partials = b_.partials;
    for (const Slice* before = slices_.data(); before != &slice; ++before)
      partials += before->plan(i).partials * before->kernels.width(l.head_dim);
    return {
        .rows = slice.rows,
        .plan = slice.plan(i),
        .k = slice.k[i],
        .v = slice.v[i],
        .scores = l.scores,
        .sink_logits = l.sink_logits.defined() ? l.sink_logits.const_data_ptr<float>() : nullptr,
        .group = l.q_heads / l.kv_heads,
        .q = {reinterpret_cast<const char*>(b_.qkv + slice.begin * width), width, l.head_dim},
        .out = {reinterpret_cast<char*>(b_.mixed + slice.begin * out), out, l.head_dim},
        .partials = partials,
    };
  }

  // x plus what attention found, and the norm of that as products want it.
  void leave(Team& team, Member member, const Layer& l) const {
    const int64_t d = l.width(), mixed = l.o.weight->width;
    X* const line = b_.lines + member * b_.line;
    team.share(member, n_, [&](int64_t row) { l.o.weight->enter(b_.entered, n_, b_.mixed + row * mixed, row); });
    multiply(team, member, l.o, b_.entered, b_.projected);
    team.share(member, n_, [&](int64_t row) {
      X *x = x_ + row * d, *added = b_.projected + row * d;
      if (l.post_norm.defined()) norm_row(added, l.post_norm, l.eps, added, d);
      add_row(x, added, x, d);
      norm_row(x, l.next_norm, l.eps, line, d);
      l.gate_up.weight->enter(b_.entered, n_, line, row);
    });
  }

  // Sums of a pair of panels and of their twins: gated, and as the next product wants them.
  void gate(const Layer& l, const float* gates, const float* ups, int64_t size, int64_t panel) const {
    constexpr int64_t PART = Gemm::PART, ROWS = 16;
    static constexpr float NONE[PART] = {};
    const float* const biases = l.gate_up.biases();
    const float *gate_bias = NONE, *up_bias = NONE;
    if (biases != nullptr) {
      gate_bias = biases + panel * PANEL;
      up_bias = gate_bias + l.down.weight->width;
    }
    for (int64_t first = 0, last; first < n_; first = last) {
      last = std::min(n_, first + ROWS);
      X gated[ROWS * PART], up[PART];
      for (int64_t row = first; row < last; ++row) {
        X* const to = gated + (row - first) * PART;
        put_pair(gates + row * PANEL, size, gate_bias, to, PART);
        put_pair(ups + row * PANEL, size, up_bias, up, PART);
        silu_mul_row(to, up, to, PART);
      }
      l.down.weight->enter_part(b_.gated_entered, n_, gated, first, last, panel * PANEL);
    }
  }

  // Whether gates can be applied to a few columns of sums, which then are rows of the next product.
  static bool gated_in_parts(const Layer& l) { return l.down.weight->width % BLOCK == 0 && l.down.weight->in_parts(); }

  // What the feed-forward adds.
  void feed(Team& team, Member member, const Layer& l) const {
    gated_in_parts(l) ? gate_parts(team, member, l) : gate_rows(team, member, l);
    multiply(team, member, l.down, b_.gated_entered, b_.projected);
    if (!l.feed_norm.defined()) return;
    const int64_t d = l.width();
    team.share(member, n_, [&](int64_t row) {
      X* const added = b_.projected + row * d;
      norm_row(added, l.feed_norm, l.eps, added, d);
    });
  }

  // Sums become gated rows of the next product before they leave the cache.
  void gate_parts(Team& team, Member member, const Layer& l) const {
    const int64_t panels = l.down.weight->width / PANEL;
    const auto put = [&](int64_t first, int64_t last, const float* sums, int64_t size) {
      const float* const up = sums + (last - first) * size;
      for (int64_t i = 0; i < last - first; i += PAIR) gate(l, sums + i * size, up + i * size, size, first + i);
    };
    l.gate_up.weight->multiply(team, member, b_.entered, n_, b_.sums + member * b_.sums_of, panels, put);
  }

  void gate_rows(Team& team, Member member, const Layer& l) const {
    const int64_t f = l.down.weight->width;
    multiply(team, member, l.gate_up, b_.entered, b_.gate_up);
    X* const line = b_.lines + member * b_.line;
    team.share(member, n_, [&](int64_t row) {
      const X* const gate = b_.gate_up + row * 2 * f;
      silu_mul_row(gate, gate + f, line, f);
      l.down.weight->enter(b_.gated_entered, n_, line, row);
    });
  }

  const std::vector<Layer>& layers_;
  const std::vector<Slice>& slices_;
  X* x_;  // [N, d]: the sum so far
  int64_t n_;
  const int64_t* positions_;
  Seconds& seconds_;
  Buffers<X> b_{};
};

}  // namespace kvmux

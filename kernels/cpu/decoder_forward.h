// The forward pass of a step through all layers of a decoder, in one team of threads. A step of few tokens is limited
// by reading the weights from memory, so nothing should come between reading one and the next: neither Python nor
// waking threads, whose data the weights have just evicted from the caches.
//
// The results have the same bits as the operations called one by one. A phase is work that all threads finish before
// any goes on. Knows neither where weights come from nor what the step is for.
#pragma once

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <vector>

#include "decoder_types.h"
#include "dispatch.h"
#include "epilogue.h"
#include "layers.h"
#include "workspace.h"

namespace kvmux {

// Applies RMS norm to a row of n numbers; the norm's weight may be of another type than the row.
template <typename X>
void norm_row(const X* x, const at::Tensor& weight, float eps, X* y, int64_t n) {
  with_type(weight.scalar_type(),
            [&](auto of_weight) { rms_norm_row(x, weight.const_data_ptr<decltype(of_weight)>(), eps, y, n); });
}

// Memory for the activations of a step.
template <typename X>
struct Buffers {
  X *qkv, *mixed, *projected;  // [N, ...]
  X* gate_up;                  // [N, ...]; used only if the down projection's weight does not pack columns
  char *input, *gated_input;   // rows of x and of the gated sums, packed by Gemm::pack_row
  float *sums, *partials;
  X* lines;               // scratch memory, a row for each thread
  int64_t sums_of, line;  // numbers of a thread
};

// The operations whose seconds are measured, named as in Python; here RoPE is a part of WRITE_KV.
enum TimedOp { QKV_PROJ_ROPE, WRITE_KV, ATTEND, O_PROJ_ADD_NORM, MLP, TIMED_OPS };
using Seconds = std::array<double, TIMED_OPS>;

// A step, which runs up to the next layer with a hook: there the caller computes attention of some slices, and resumes.
class ForwardStep {
 public:
  virtual ~ForwardStep() = default;
  // Runs to the end, or to the next layer with a hook; returns the number of that layer, or -1 at the end.
  virtual int64_t run() = 0;
  // Returns q, k, v and the attention output [n, heads, head_dim] of a slice, in the layer that run() has returned.
  virtual std::vector<at::Tensor> hook_tensors(size_t slice) const = 0;
};

template <typename X>
class DecoderForward : public ForwardStep {
 public:
  DecoderForward(const std::vector<Layer>& layers, const std::vector<Slice>& slices, X* x, int64_t rows,
                 const int64_t* positions, Workspace& space, Seconds& seconds)
      : layers_(layers), slices_(slices), x_(x), n_(rows), positions_(positions), seconds_(seconds) {
    prepare(space);
  }

  int64_t run() override {
    end_ = hook_ + 1;
    while (end_ < std::ssize(layers_) && !has_hook(end_)) ++end_;
    Team::run(threads_, *this);
    return hook_ = end_ == std::ssize(layers_) ? -1 : end_;
  }

  std::vector<at::Tensor> hook_tensors(size_t slice) const override {
    const Layer& l = layers_.at(hook_);
    const auto& [begin, end, locations, tap_of, taps] = slices_.at(slice);
    const int64_t d = l.head_dim, width = l.heads() * d, mixed = l.q_heads * d;
    const auto view = [&](X* first, int64_t heads, int64_t stride) {
      return at::from_blob(first, {end - begin, heads, d}, {stride, d, 1}, c10::CppTypeToScalarType<X>::value);
    };
    X* const q = b_.qkv + begin * width;
    return {view(q, l.q_heads, width), view(q + l.q_heads * d, l.kv_heads, width),
            view(q + (l.q_heads + l.kv_heads) * d, l.kv_heads, width),
            view(b_.mixed + begin * mixed, l.q_heads, mixed)};
  }

  void operator()(Team& team, Member member) const {
    if (hook_ >= 0) finish_layer(team, member, hook_);
    for (int64_t i = hook_ + 1; i < end_; ++i) {
      attend_layer(team, member, i);
      finish_layer(team, member, i);
    }
    if (end_ < std::ssize(layers_)) return attend_layer(team, member, end_);
    const int64_t d = layers_[0].width();
    team.share(member, n_, [&](int64_t row) { add_row(x_ + row * d, b_.projected + row * d, x_ + row * d, d); });
  }

 private:
  // Computes layer i up to the attention of those slices that have no hook there.
  void attend_layer(Team& team, Member member, size_t i) const {
    timed(member, QKV_PROJ_ROPE, [&] { qkv_proj(team, member, i); });
    timed(member, WRITE_KV, [&] { rope_and_write(team, member, i); });
    timed(member, ATTEND, [&] { attend(team, member, i); });
  }

  // Computes the rest of layer i.
  void finish_layer(Team& team, Member member, size_t i) const {
    timed(member, O_PROJ_ADD_NORM, [&] { o_proj_add_norm(team, member, layers_[i]); });
    timed(member, MLP, [&] { mlp(team, member, layers_[i]); });
  }

  bool has_hook(size_t i) const {
    return std::ranges::any_of(slices_, [i](const Slice& slice) { return slice.locations[i] == nullptr; });
  }

  // Calls work() in every thread; thread 0 measures the time and adds it to `seconds_`.
  template <typename Work>
  void timed(Member member, TimedOp op, const Work& work) const {
    if (member != 0) return work();
    const auto began = std::chrono::steady_clock::now();
    work();
    seconds_[op] += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

  // Takes memory for the buffers, as large as the largest layer needs.
  void prepare(Workspace& space) {
    int64_t qkv = 0, mixed = 0, width = 0, gated = 0, gate_up = 0, input = 0, gated_input = 0, partials = 0;
    for (const Layer& l : layers_) {
      qkv = std::max(qkv, l.heads() * l.head_dim);
      mixed = std::max(mixed, l.o.weight->width);
      width = std::max(width, l.width());
      gated = std::max(gated, l.down.weight->width);
      if (!gates_columns(l)) gate_up = std::max(gate_up, 2 * l.down.weight->width);
      for (const auto* p : {&l.qkv, &l.o, &l.gate_up}) input = std::max(input, p->weight->input_bytes(n_));
      gated_input = std::max(gated_input, l.down.weight->input_bytes(n_));
      for (const auto* p : {&l.qkv, &l.o, &l.gate_up, &l.down})
        b_.sums_of = std::max(b_.sums_of, p->weight->sums_size(n_));
    }
    for (const Slice& slice : slices_) {
      int64_t most = 0;
      for (size_t i = 0; i < layers_.size(); ++i)
        if (const Location* const at = slice.locations[i])
          most = std::max(most, at->plan(i).partials * at->kernels.partial_size(MAX_DIM));
      partials += most;
    }
    b_.line = std::max(width, gated);
    b_.qkv = space.take<X>(n_ * qkv);
    b_.mixed = space.take<X>(n_ * mixed);
    b_.projected = space.take<X>(n_ * width);
    b_.gate_up = space.take<X>(n_ * gate_up);
    b_.input = space.take<char>(input);
    b_.gated_input = space.take<char>(gated_input);
    b_.sums = space.take<float>(threads_ * b_.sums_of);
    b_.partials = space.take<float>(partials);
    b_.lines = space.take<X>(threads_ * b_.line);
  }

  // Multiplies packed rows by a weight into y [N, outputs].
  void multiply(Team& team, Member member, const Projection& p, char* input, X* y) const {
    const int64_t outputs = p.weight->outputs;
    const auto epilogue = [&](int64_t first, int64_t last, const float* sums, int64_t size) {
      store_rows(sums, size, first, last, p.biases(), y, n_, outputs);
    };
    p.weight->multiply(team, member, input, n_, b_.sums + member * b_.sums_of, 0, epilogue);
  }

  // Adds the output of the previous layer's feed-forward to x; computes q, k and v from the norm of the sum.
  void qkv_proj(Team& team, Member member, size_t i) const {
    const Layer& l = layers_[i];
    const int64_t d = l.width();
    X* const line = b_.lines + member * b_.line;
    team.share(member, n_, [&](int64_t row) {
      X* x = x_ + row * d;
      if (i > 0) add_row(x, b_.projected + row * d, x, d);
      norm_row(x, l.norm, l.eps, line, d);
      l.qkv.weight->pack_row(b_.input, n_, line, row);
    });
    multiply(team, member, l.qkv, b_.input, b_.qkv);
  }

  // Normalises (if the model does) and rotates q and k of layer i; writes keys and values to their slots.
  void rope_and_write(Team& team, Member member, size_t i) const {
    const Layer& l = layers_[i];
    const int64_t width = l.heads() * l.head_dim, rotated_heads = l.q_heads + l.kv_heads;
    team.share(member, n_, [&](int64_t row) {
      X* const heads = b_.qkv + row * width;
      for (int64_t h = 0; h < rotated_heads; ++h) {
        X* const head = heads + h * l.head_dim;
        if (l.q_norm.defined()) norm_row(head, h < l.q_heads ? l.q_norm : l.k_norm, l.eps, head, l.head_dim);
        if (!l.cos.defined()) continue;
        const int64_t half = l.cos.size(1), at = positions_[row] * l.cos.stride(0);
        rope_row(head, l.cos.const_data_ptr<float>() + at, l.sin.const_data_ptr<float>() + at, head, half);
      }
      write_token(i, row, heads, heads + l.q_heads * l.head_dim, heads + rotated_heads * l.head_dim);
    });
  }

  // Writes the key and value of a token in layer i to its slot, unless the layer has a hook; a padding token has no
  // slot. Copies the token's query if the strategy asks for it.
  void write_token(size_t i, int64_t token, const X* q, const X* k, const X* v) const {
    const Slice& slice = slice_of(token);
    const int64_t own = token - slice.begin, dim = layers_[i].head_dim;
    if (!slice.taps.empty() && slice.taps[i] != nullptr && slice.tap_of[own] >= 0) {
      const int64_t size = layers_[i].q_heads * dim * sizeof(X);
      std::memcpy(slice.taps[i] + slice.tap_of[own] * size, q, size);
    }
    const Location* const at = slice.locations[i];
    if (at == nullptr) return;
    const int64_t row = at->row_of[own], first = at->rows.first(row);
    if (at->rows.is_padding(row)) return;
    const auto heads = [&](const X* x) {
      return Heads<const char>{reinterpret_cast<const char*>(x), /*token_stride=*/0, dim};
    };
    at->kernels.write(at->planes.k(i), at->planes.v(i), at->rows, layers_[i].kv_heads, row, own - first, heads(k),
                      heads(v));
  }

  const Slice& slice_of(int64_t token) const {
    size_t s = slices_.size() - 1;
    while (slices_[s].begin > token) --s;
    return slices_[s];
  }

  // Computes the attention of layer i, for all slices without a hook there, and stores it in the buffer `mixed`.
  void attend(Team& team, Member member, size_t i) const {
    int64_t items = 0, merges = 0;
    for (const Slice& slice : slices_)
      if (const Location* const at = slice.locations[i]) {
        items += at->plan(i).items.size();
        merges += at->plan(i).merges.size();
      }
    team.share(member, items, [&](int64_t n) {
      const Slice& slice = find_slice(i, n, &Plan::items);
      const Location& at = *slice.locations[i];
      at.kernels.attend(make_call(slice, i), at.plan(i).items[n], at.plan(i).next(n));
    });
    if (merges == 0) return;
    team.share(member, merges, [&](int64_t n) {
      const Slice& slice = find_slice(i, n, &Plan::merges);
      const Location& at = *slice.locations[i];
      at.kernels.merge(make_call(slice, i), at.plan(i).merges[n]);
    });
  }

  // Returns the slice that contains piece of work number n, counted over all slices; n becomes the piece's number in
  // that slice.
  template <typename Pieces>
  const Slice& find_slice(size_t i, int64_t& n, Pieces Plan::* pieces) const {
    const auto size = [&](const Slice& slice) -> int64_t {
      return slice.locations[i] == nullptr ? 0 : (slice.locations[i]->plan(i).*pieces).size();
    };
    size_t s = 0;
    for (int64_t here; n >= (here = size(slices_[s])); ++s) n -= here;
    return slices_[s];
  }

  AttentionCall make_call(const Slice& slice, size_t i) const {
    const Layer& l = layers_[i];
    const Location& at = *slice.locations[i];
    const int64_t width = l.heads() * l.head_dim, out = l.q_heads * l.head_dim;
    float* partials = b_.partials;
    for (const Slice* before = slices_.data(); before != &slice; ++before)
      if (const Location* const other = before->locations[i])
        partials += other->plan(i).partials * other->kernels.partial_size(l.head_dim);
    return {
        .rows = at.rows,
        .plan = at.plan(i),
        .k = at.planes.k(i),
        .v = at.planes.v(i),
        .scores = l.scores,
        .sink_logits = l.sink_logits.defined() ? l.sink_logits.const_data_ptr<float>() : nullptr,
        .group = l.q_heads / l.kv_heads,
        .q = {reinterpret_cast<const char*>(b_.qkv + slice.begin * width), width, l.head_dim},
        .out = {reinterpret_cast<char*>(b_.mixed + slice.begin * out), out, l.head_dim},
        .partials = partials,
    };
  }

  // Adds the projection of attention's output to x; packs the norm of the sum as input of the feed-forward.
  void o_proj_add_norm(Team& team, Member member, const Layer& l) const {
    const int64_t d = l.width(), mixed = l.o.weight->width;
    X* const line = b_.lines + member * b_.line;
    team.share(member, n_, [&](int64_t row) { l.o.weight->pack_row(b_.input, n_, b_.mixed + row * mixed, row); });
    multiply(team, member, l.o, b_.input, b_.projected);
    team.share(member, n_, [&](int64_t row) {
      X *x = x_ + row * d, *added = b_.projected + row * d;
      if (l.post_norm.defined()) norm_row(added, l.post_norm, l.eps, added, d);
      add_row(x, added, x, d);
      norm_row(x, l.next_norm, l.eps, line, d);
      l.gate_up.weight->pack_row(b_.input, n_, line, row);
    });
  }

  static void gate_row(const Layer& l, const X* gate, const X* up, X* to, int64_t n) {
    l.gelu ? gelu_tanh_mul_row(gate, up, to, n) : silu_mul_row(gate, up, to, n);
  }

  // Computes activation(gate) * up for two panels, from the sums of the gate's panels and of the up projection's, and
  // packs the result as input of the down projection.
  void gate_panels(const Layer& l, const float* gates, const float* ups, int64_t size, int64_t panel) const {
    constexpr int64_t PART = Gemm::PART, ROWS = 16;
    const float* const gate_bias = bias_of_pair(l.gate_up.biases(), panel * PANEL);
    const float* const up_bias = bias_of_pair(l.gate_up.biases(), panel * PANEL + l.down.weight->width);
    for (int64_t first = 0, last; first < n_; first = last) {
      last = std::min(n_, first + ROWS);
      X gated[ROWS * PART], up[PART];
      for (int64_t row = first; row < last; ++row) {
        X* const to = gated + (row - first) * PART;
        store_pair(gates + row * PANEL, size, gate_bias, to, PART);
        store_pair(ups + row * PANEL, size, up_bias, up, PART);
        gate_row(l, to, up, to, PART);
      }
      for (int64_t row = first; row < last; ++row)
        l.down.weight->pack(b_.gated_input, n_, gated + (row - first) * PART, row, panel * PANEL, PART);
    }
  }

  // Returns whether the feed-forward's gate can be applied to a few columns at a time, while they are packed for the
  // down projection.
  static bool gates_columns(const Layer& l) { return l.down.weight->width % BLOCK == 0; }

  // Computes the output of the feed-forward into the buffer `projected`; the next layer adds it to x.
  void mlp(Team& team, Member member, const Layer& l) const {
    gates_columns(l) ? gate_columns(team, member, l) : gate_rows(team, member, l);
    multiply(team, member, l.down, b_.gated_input, b_.projected);
    if (!l.mlp_post_norm.defined()) return;
    const int64_t d = l.width();
    team.share(member, n_, [&](int64_t row) {
      X* const added = b_.projected + row * d;
      norm_row(added, l.mlp_post_norm, l.eps, added, d);
    });
  }

  // Multiplies by the gate and up projections, panel by panel; applies the gate and packs the result while it is in the
  // cache.
  void gate_columns(Team& team, Member member, const Layer& l) const {
    const int64_t panels = l.down.weight->width / PANEL;
    const auto epilogue = [&](int64_t first, int64_t last, const float* sums, int64_t size) {
      const float* const up = sums + (last - first) * size;
      for (int64_t i = 0; i < last - first; i += PAIR) gate_panels(l, sums + i * size, up + i * size, size, first + i);
    };
    l.gate_up.weight->multiply(team, member, b_.input, n_, b_.sums + member * b_.sums_of, panels, epilogue);
  }

  // Multiplies by the gate and up projections, then applies the gate to whole rows and packs them.
  void gate_rows(Team& team, Member member, const Layer& l) const {
    const int64_t f = l.down.weight->width;
    multiply(team, member, l.gate_up, b_.input, b_.gate_up);
    X* const line = b_.lines + member * b_.line;
    team.share(member, n_, [&](int64_t row) {
      const X* const gate = b_.gate_up + row * 2 * f;
      gate_row(l, gate, gate + f, line, f);
      l.down.weight->pack_row(b_.gated_input, n_, line, row);
    });
  }

  const std::vector<Layer>& layers_;
  const std::vector<Slice>& slices_;
  X* x_;  // [N, d]: the residual stream
  int64_t n_;
  const int64_t* positions_;
  Seconds& seconds_;
  // The threads for which the buffers have memory: a hook may give torch more of them.
  const int64_t threads_ = Team::max_threads();
  Buffers<X> b_{};
  int64_t hook_ = -1;  // the layer in which the last run() stopped; -1: none has stopped yet
  int64_t end_ = 0;    // run() computes the layers before this one, and this one up to its attention if there is one
};

}  // namespace kvmux

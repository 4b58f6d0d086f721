// Which keys a query sees, and online softmax (Milakov & Gimelshein 2018), for the attention kernels.
#pragma once

#include "vectors.h"

constant constexpr float NOTHING = -3.402823466e+38f;  // maximum score while no key was seen

struct AttentionCall {
  int q_heads, group;                        // number of query heads, and of those that share a KV head
  int q_token, q_head, out_token, out_head;  // strides in numbers
  int model_window, window;                  // window of the model, and that of the strategy
  int has_window_start;                      // whether the addresses say where the model's window begins
  int lse_token;                             // stride of `lse`, the logarithms of sums; negative: they are not wanted
};

struct Scoring {
  float scale, softcap;  // softcap 0: none
};

// Which keys a query sees, by their indices: those in the model's window that are among the latest `window` or sinks.
struct Mask {
  int model_window, window, sinks;
  // The oldest key in the model's window, for each query of a row from index `start` on, `stride` numbers apart; null:
  // the window has the latest `model_window` keys.
  const device int* window_start;
  int start, stride;

  int oldest_of(int query) const {
    return window_start == nullptr ? query - model_window + 1 : window_start[(query - start) * stride];
  }

  bool sees(int query, int key) const {
    return key <= query && key >= oldest_of(query) && (query - key < window || key < sinks);
  }
};

// Returns the mask of a row's KV head: `first` is the row's first token in the step, `start` its index.
inline Mask mask_of(AttentionCall a, Memory m, const device int* window_start, int first, int start, int head) {
  const device int* own = a.has_window_start ? window_start + first * m.heads + (m.heads > 1 ? head : 0) : nullptr;
  return {a.model_window, a.window, m.layout.sinks, own, start, m.heads};
}

// Returns where to write the logarithm of the sum of a token's query head; null if it is not wanted.
inline device float* lse_of(device float* lse, AttentionCall a, int token, int head) {
  return a.lse_token < 0 ? nullptr : lse + size_t(token) * a.lse_token + head;
}

inline float score_of(float product, Scoring scoring) {
  const float score = product * scoring.scale;
  return scoring.softcap == 0.0f ? score : scoring.softcap * precise::tanh(score / scoring.softcap);
}

// The sums so far for one query: `total` of exp(score - top), and `values` of exp(score - top) times the values, of
// which each lane holds N numbers.
template <int N>
struct Sums {
  float top = NOTHING, total = 0.0f;
  float values[N] = {0.0f};

  void raise(float higher) {
    const float factor = fast::exp(top - higher);
    top = higher;
    total *= factor;
    for (int n = 0; n < N; n++) values[n] *= factor;
  }

  void add(float other_top, float other_total, const thread float* other_values) {
    const float higher = max(top, other_top), factor = fast::exp(other_top - higher);
    raise(higher);
    total += factor * other_total;
    for (int n = 0; n < N; n++) values[n] += factor * other_values[n];
  }

  // Adds a sink logit, a learned logit that has no value; if `logit` is NOTHING, the layer has none.
  void add_sink(float logit) {
    const float nothing[N] = {0.0f};
    add(logit, 1.0f, nothing);
  }

  // The logarithm of the sum of exp(score).
  float lse() const { return top + precise::log(total); }
};

// Which keys a query sees, and online softmax (Milakov & Gimelshein 2018), for the attention kernels.
#pragma once

#include "slots.h"

constant constexpr int MOST_NUMBERS = 8;  // numbers of a head that one lane holds at most: heads have up to 256
constant constexpr float NOTHING = -3.402823466e+38f;  // maximum score while no key was seen

struct AttentionCall {
  int q_heads, group;                        // number of query heads, and of those that share a KV head
  int q_token, q_head, out_token, out_head;  // strides in numbers
  int model_window, window;                  // window of the model, and that of the strategy
};

struct Scoring {
  float scale, softcap;  // softcap 0: none
};

// Which keys a query sees: the latest ones within both windows, and the sinks within the model's window.
struct Mask {
  int model_window, window, sinks;

  bool sees(int query, int key) const {
    const int distance = query - key;
    return distance >= 0 && distance < model_window && (distance < window || key < sinks);
  }
};

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
};

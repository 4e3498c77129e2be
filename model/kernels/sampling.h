// What the sampler's kernels are asked and what they answer: plain records, filled by library.cpp. See sampler.h.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int64_t NO_TOKEN = -1, BAD_LOGITS = -2;  // as in model/batch.py

// How one row draws; meanings and order as in model/params.py. Temperature 0 is argmax.
struct Wish {
  double temperature, top_k, top_p, min_p, uniform;
};

struct Sampling {
  int64_t (*scratch_bytes)(int64_t vocab);
  // A token, or NO_TOKEN where all logits are -inf, or BAD_LOGITS where one is NaN or +inf.
  int64_t (*draw)(const float* logits, int64_t vocab, const Wish& wish, void* scratch);
  // values [1 + count]: natural logarithms of the token's probability, and of the likeliest ones, lower ids first among
  // equals; numbers [1 + count]: the token's rank, from 1, and the ids of those. NaN where the logits are not finite.
  void (*logprobs)(const float* logits, int64_t vocab, int64_t token, int64_t count, double* values, int64_t* numbers,
                   void* scratch);
};

}  // namespace octavo

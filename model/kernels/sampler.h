// From a row of logits to a token, and to logprobs. Meaning and order are those of model/sampler.py, model/truncation.py
// and model/logprobs.py, which stay the reference.
//
//   survey   one pass: tops, the largest logit of each lane of each stripe; from them peak and argmax
//   gather   the few logits that can belong to the support, above a bound, with their ids; most stripes are passed over
//   total    one pass of exponentials, only where a share of all tokens is asked for
//
// A row is one thread's work, so what it gives does not depend on the rows beside it. A weight is a probability divided
// by that of the likeliest token.
#pragma once

#include <algorithm>
#include <cfloat>
#include <functional>

#include "sampling.h"
#include "simd.h"

namespace OCTAVO_ISA {

using octavo::Wish;

constexpr int64_t STRIPE = 512;
constexpr float INFINITE = __builtin_inff();

inline int64_t stripes(int64_t size) { return (size + STRIPE - 1) / STRIPE; }

inline bool any(vi mask) {
  uint64_t words[W / 2], all = 0;
  store(words, mask);
  for (uint64_t word : words) all |= word;
  return all != 0;
}

// 2^x for x <= 0, within 2e-7 of it: 2^n 2^f, n whole, |f| <= 1/2, 2^f by a polynomial fitted for least relative error.
// Exactly 1 at 0; exactly 0 below -126.
inline vf power_of_two(vf x) {
  const vf shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf p = f * 0.00132647273f + 0.00967151299f;
  p = p * f + 0.0555073358f;
  p = p * f + 0.240222424f;
  p = p * f + 0.693147004f;
  p = p * f + 1.0f;
  return (vf)(((vu)p + ((vu)shifted << 23)) & (vu)(x >= -126.0f));
}

// The likeliest candidates: those above a weight, and of those that equal it the first `ties`.
struct Cut {
  float value;
  int64_t ties;
  double sum;  // of their weights
};

// A row and what is found in it.
class Survey {
 public:
  const float* const logits;
  const int64_t size;
  float peak;          // NaN where there is one
  int64_t likeliest;   // the first id that has the peak
  int64_t count = 0;   // candidates: their ids, ascending, and their logits, which `weigh` turns into weights
  int32_t* ids;
  float* values;

  static int64_t bytes(int64_t size) {
    return stripes(size) * (8 + 2 * W * 4) + 3 * (size + W) * 4;
  }

  Survey(const float* from, int64_t n, void* scratch) : logits(from), size(n) {
    sums_ = (double*)scratch;
    tops_ = (float*)(sums_ + stripes(n));
    ranked_ = tops_ + stripes(n) * W;
    values = ranked_ + stripes(n) * W + n + W;
    ids = (int32_t*)(values + n + W);
    vf all = splat(-INFINITE);
    vi broken = {};
    for (int64_t first = 0; first < n; first += STRIPE) {
      vf even = splat(-INFINITE), odd = even;
      for (int64_t i = first; i < std::min(first + STRIPE, n); i += 2 * W) {
        const vf a = part(i), b = part(i + W);
        broken |= (vi)(a != a) | (vi)(b != b);
        even = greater(a, even), odd = greater(b, odd);
      }
      store(tops_ + first / STRIPE * W, greater(even, odd));
      all = greater(greater(even, odd), all);
    }
    peak = any(broken) ? __builtin_nanf("") : most(all);
    likeliest = 0;
    if (!std::isfinite(peak)) return;
    while (!any(load<vf>(tops_ + likeliest / STRIPE * W) == peak)) likeliest += STRIPE;
    while (logits[likeliest] != peak) likeliest++;
  }

  // A logit that at least k have or exceed, and not many more; -inf where k is large.
  float reached_by(int64_t k) const {
    const int64_t groups = stripes(size) * W;
    if (k > groups) return -INFINITE;
    std::copy(tops_, tops_ + groups, ranked_);
    std::nth_element(ranked_, ranked_ + k - 1, ranked_ + groups, std::greater<float>());
    return ranked_[k - 1];
  }

  // The candidates are all logits of at least `bound`.
  void gather(float bound) {
    count = 0;
    for (int64_t first = 0; first < size; first += STRIPE) {
      if (!any(load<vf>(tops_ + first / STRIPE * W) >= bound)) continue;
      for (int64_t i = first; i < std::min(first + STRIPE, size); i += W) {
        if (!any(part(i) >= bound)) continue;
        for (int64_t j = i; j < std::min(i + W, size); j++) {
          ids[count] = int32_t(j), values[count] = logits[j];
          count += logits[j] >= bound;
        }
      }
    }
  }

  // The sum of the candidates' weights.
  double weigh(float coldness) {
    double all = 0;
    for (int64_t i = 0; i < count; i += W) store(values + i, weights(load<vf>(values + i), coldness));
    for (int64_t i = 0; i < count; i++) all += values[i];
    return all;
  }

  // The sum of all weights.
  double total(float coldness) {
    double all = 0;
    for (int64_t first = 0; first < size; first += STRIPE) {
      vf even = {}, odd = {};
      for (int64_t i = first; i < std::min(first + STRIPE, size); i += 2 * W)
        even += weights(part(i), coldness), odd += weights(part(i + W), coldness);
      all += sums_[first / STRIPE] = double(sum(even)) + double(sum(odd));
    }
    return all;
  }

  // The first id at which the running sum of all weights exceeds `target`. `total` was called with this coldness.
  int64_t find(double target, float coldness) const {
    int64_t stripe = 0, last = stripes(size) - 1, found = likeliest;
    while (sums_[last] == 0) last--;
    for (; stripe < last && target >= sums_[stripe]; stripe++) target -= sums_[stripe];
    const int64_t end = std::min((stripe + 1) * STRIPE, size);
    for (int64_t i = stripe * STRIPE; i < end; i += W) {
      float each[W];
      store(each, weights(part(i), coldness));
      for (int j = 0; j < W; target -= each[j++]) {
        if (each[j] > 0) found = i + j;
        if (target < each[j]) return found;
      }
    }
    return found;  // rounding had put the target past the stripe's end
  }

  // The fewest of the likeliest candidates whose number reaches `most` or whose weights reach `share`. All, where neither
  // is reached.
  Cut cut(int64_t most, double share) {
    // Positive floats are ordered like their bits: buckets by the first of them, an eighth of an octave each.
    constexpr int SHIFT = 20, BUCKETS = (0x3f800000 >> SHIFT) + 1;
    struct Bucket {
      int64_t number;
      double sum;
    } buckets[BUCKETS] = {};
    const auto bucket_of = [](float weight) {
      int32_t bits;
      std::memcpy(&bits, &weight, sizeof bits);
      return bits >> SHIFT;
    };
    for (int64_t i = 0; i < count; i++) {
      Bucket& bucket = buckets[bucket_of(values[i])];
      bucket.number++, bucket.sum += values[i];
    }
    int64_t number = 0;
    double sum = 0;
    int last = BUCKETS - 1;
    for (; last > 0 && number + buckets[last].number < most && sum + buckets[last].sum < share; last--)
      number += buckets[last].number, sum += buckets[last].sum;
    float* end = std::copy_if(values, values + count, ranked_, [&](float w) { return bucket_of(w) == last; });
    std::sort(ranked_, end, std::greater<float>());
    Cut found{0, 0, sum};
    for (const float* at = ranked_; at < end && number < most && found.sum < share; at++, number++) {
      found.ties = *at == found.value ? found.ties + 1 : 1;
      found.value = *at, found.sum += *at;
    }
    return found;
  }

  // All candidates of at least this weight.
  Cut at_least(float weight) const {
    Cut all{weight, count, 0};
    for (int64_t i = 0; i < count; i++) all.sum += values[i] >= weight ? values[i] : 0;
    return all;
  }

  // Draw one of what was cut: where the running sum of its weights exceeds a share of their sum.
  int64_t pick(double share, const Cut& cut) const {
    const double target = share * cut.sum;
    double sum = 0;
    int64_t found = likeliest, ties = cut.ties;
    for (int64_t i = 0; i < count && sum <= target; i++) {
      const float weight = values[i];
      if (weight == 0 || weight < cut.value || (weight == cut.value && ties-- <= 0)) continue;
      found = ids[i], sum += weight;
    }
    return found;
  }

  // The n largest candidates in order, lower ids first among equals. Before they are weighed.
  void sort(int64_t n, int64_t* to, double* to_values) const {
    int32_t* order = (int32_t*)ranked_;
    for (int64_t i = 0; i < count; i++) order[i] = int32_t(i);
    std::partial_sort(order, order + n, order + count, [&](int32_t a, int32_t b) {
      return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    for (int64_t i = 0; i < n; i++) to[i] = ids[order[i]], to_values[i] = values[order[i]];
  }

  // How many logits are larger.
  int64_t above(float value) const {
    vi lanes = {};
    for (int64_t i = 0; i < size; i += W) lanes -= (vi)(part(i) > value);
    int64_t all = 0;
    for (int j = 0; j < W; j++) all += lanes[j];
    return all;
  }

 private:
  // W logits, or the last ones; behind them -inf.
  vf part(int64_t i) const {
    if (i + W <= size) return load<vf>(logits + i);
    vf v = splat(-INFINITE);
    if (i < size) std::memcpy(&v, logits + i, (size - i) * sizeof(float));
    return v;
  }

  vf weights(vf v, float coldness) const { return power_of_two((v - peak) * coldness); }

  double* sums_;   // [stripes] of weights
  float* tops_;    // [stripes, W]
  float* ranked_;  // room to sort tops or candidates
};

// What differences of logits are multiplied by: weights are powers of two.
inline float colder(double temperature) { return std::max(float(1.44269504088896 / temperature), FLT_MIN); }

inline int64_t draw(const float* logits, int64_t size, const Wish& wish, void* scratch) {
  Survey row(logits, size, scratch);
  if (!std::isfinite(row.peak)) return row.peak == -INFINITE ? octavo::NO_TOKEN : octavo::BAD_LOGITS;
  if (wish.temperature == 0) return row.likeliest;
  const float coldness = colder(wish.temperature), floor = float(wish.min_p);
  const bool counted = wish.top_k > 0 && wish.top_k < size, shared = wish.top_p < 1;
  if (!counted && !shared && floor <= 0) return row.find(wish.uniform * row.total(coldness), coldness);

  // No smaller logit has so large a weight; a little lower, for rounding.
  const auto logit = [&](double weight) {
    const double low = row.peak + (std::log2(weight) - 1e-3) / coldness - 1e-6 * std::fabs(row.peak);
    return float(std::max(low, -double(FLT_MAX)));
  };
  double share = DBL_MAX;
  if (shared && !counted) {
    const double whole = row.total(coldness);
    share = wish.top_p * whole;
    // What weighs less belongs to the tokens that top-p leaves out, whatever their number (halved: rounding).
    const double least = std::max(double(floor), (1 - wish.top_p) / double(size) / 2 * whole);
    for (double bound = whole / 1024;; bound /= 16) {
      row.gather(logit(std::max(bound, least)));
      if (row.weigh(coldness) >= share || bound <= least) break;
    }
  } else {
    const float bound = counted ? row.reached_by(int64_t(wish.top_k)) : -FLT_MAX;
    row.gather(shared ? bound : std::max(bound, logit(floor)));  // a share is one of all that top-k leaves
    row.weigh(coldness);
  }
  const int64_t most = counted ? int64_t(wish.top_k) : size;
  if (shared && counted) share = wish.top_p * row.cut(most, DBL_MAX).sum;
  const Cut cut = row.cut(most, share);
  return row.pick(wish.uniform, cut.value < floor ? row.at_least(floor) : cut);
}

inline void logprobs(const float* logits, int64_t size, int64_t token, int64_t count, double* values, int64_t* numbers,
                     void* scratch) {
  Survey row(logits, size, scratch);
  const double norm = std::isfinite(row.peak) ? row.peak + std::log(row.total(colder(1))) : __builtin_nan("");
  row.gather(count ? row.reached_by(count) : INFINITE);
  count = std::min(count, row.count);
  values[0] = logits[token], numbers[0] = 1 + row.above(logits[token]);
  row.sort(count, numbers + 1, values + 1);
  for (int64_t i = 0; i <= count; i++) values[i] -= norm;
}

extern const octavo::Sampling sampling;
const octavo::Sampling sampling = {Survey::bytes, draw, logprobs};

}  // namespace OCTAVO_ISA

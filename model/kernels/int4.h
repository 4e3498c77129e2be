// Weights of four bits: groups of GROUP inputs, each with a scale and a lowest value of its own.
//
//   weight = low + scale · code, codes 0 to 15
//
//   a group of a panel   │ scales f16 [2 W] │ lows f16 [2 W] │ codes [GROUP / 2][W][2] │
//   a byte of codes      output j in its low half, output j + W in its high one, so that a mask and a shift widen
//
// Files of type Q4_0, Q4_1 and Q4_K have such groups, which are found again: their weights stay what they are.
#pragma once

#include "simd.h"

namespace OCTAVO_ISA {

constexpr int64_t GROUP = 32;

inline int64_t groups(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// For W outputs at a time.
struct Fit {
  vf scale, low;

  // In the 16 bits that are kept of them.
  static Fit kept(vf scale, vf low) {
    f16 half[2][W];
    narrow(half[0], scale), narrow(half[1], low);
    return {widen(half[0]), widen(half[1])};
  }

  vf code(vf x) const {
    const vf inverse = scale > 0.0f ? 1.0f / scale : vf{};
    return at_most(at_least((x - low) * inverse, 0.0f), 15.0f) + 12582912.0f - 12582912.0f;  // 1.5 * 2^23: to nearest
  }

  vf error(const vf* x, int64_t count) const {
    vf total = {};
    for (int64_t i = 0; i < count; i++) {
      const vf off = x[i] - (low + scale * code(x[i]));
      total += off * off;
    }
    return total;
  }

  // The least squares of x given its codes.
  Fit refined(const vf* x, int64_t count) const {
    vf q = {}, qq = {}, sum = {}, qx = {};
    for (int64_t i = 0; i < count; i++) {
      const vf c = code(x[i]);
      q += c, qq += c * c, sum += x[i], qx += c * x[i];
    }
    const vf n = splat(float(count)), spread = n * qq - q * q;
    const vf better = spread > 0.0f ? (n * qx - q * sum) / spread : scale;
    return kept(better, (sum - better * q) / n);
  }
};

// Of so many inputs x [count] of a group. A group that uses fewer codes than 16 had fewer in its file; with more, its
// outliers are cut off.
inline Fit fit(const vf* x, int64_t count) {
  vf low = x[0], high = x[0], broken = {};
  for (int64_t i = 0; i < count; i++) {
    low = x[i] < low ? x[i] : low, high = greater(x[i], high);
    broken += x[i] * 0.0f;  // NaN where a weight is not finite
  }
  Fit best = Fit::kept((high - low) / 15.0f, low);
  vf least = best.error(x, count);
  const auto consider = [&](const Fit& it) {
    const vf error = it.error(x, count);
    best = {error < least ? it.scale : best.scale, error < least ? it.low : best.low};
    least = error < least ? error : least;
  };
  consider(best.refined(x, count));
  for (const float steps : {14, 13, 12, 11, 10, 9, 8, 16, 17}) {
    // Weights in general are off by a twelfth of a squared step. What comes from a file is off by its rounding to
    // bfloat16, a 3,000th where zero is within its range; much more may be one weight with a wrong code.
    const vf off = least - best.scale * best.scale * (float(count) / 2000);
    if (most(off) <= 0) break;
    const Fit it = Fit::kept((high - low) / steps, low);
    consider(it);
    consider(it.refined(x, count));
  }
  return {best.scale, best.low + broken};
}

// One group of the first (0) or second (1) W outputs of a panel, x [count]. The first must be packed before the second.
inline void pack_fours(const vf* x, int64_t count, int second, uint8_t* group) {
  const Fit it = fit(x, count);
  f16* scales = (f16*)group + second * W;
  narrow(scales, it.scale), narrow(scales + 2 * W, it.low);
  uint8_t* codes = group + 8 * W;
  for (int64_t i = 0; i < GROUP; i++) {
    const vi code = i < count ? __builtin_convertvector(it.code(x[i]), vi) & 15 : vi{};  // NaN is no code
    for (int j = 0; j < W; j++) {
      uint8_t& both = codes[(i / 2 * W + j) * 2 + i % 2];
      both = second ? uint8_t(both | code[j] << 4) : uint8_t(code[j]);
    }
  }
}

}  // namespace OCTAVO_ISA

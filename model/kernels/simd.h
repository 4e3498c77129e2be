// Vectors of W floats, in GCC's and Clang's portable vector extension: one source for every instruction set.
//
// Each instruction set compiles these headers into a namespace of its own (OCTAVO_ISA), so no function of one can be
// mistaken by the linker for that of another. Intrinsics stand only where the extension has no word for it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// OCTAVO_EMULATED: the widths and layouts of AVX-512, without its instructions, so that they can be tested anywhere.
#if defined(__AVX512BF16__) || defined(OCTAVO_EMULATED)
#define OCTAVO_BF16
#endif

namespace OCTAVO_ISA {

#if defined(__AVX512F__) || defined(OCTAVO_EMULATED)
constexpr int W = 16;
constexpr int ROWS = 12;  // rows of a register tile: ROWS x 2 accumulators, two vectors of weights, one broadcast
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int ROWS = 6;
#else
constexpr int W = 8;
constexpr int ROWS = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef int16_t vs __attribute__((vector_size(W * 4)));  // 2 W of them: pairs, one pair a lane
typedef int8_t vb __attribute__((vector_size(W * 2)));
typedef int8_t vc __attribute__((vector_size(W)));

template <class V, class T>
inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

inline vf splat(float x) { return x - vf{}; }  // x + 0 would be an addition: it turns -0 into 0

// The order of comparison and choice lets a NaN through: broken numbers must reach the sampler, which reports them.
inline vf at_least(vf x, float low) { return x < low ? splat(low) : x; }
inline vf at_most(vf x, float high) { return x > high ? splat(high) : x; }
inline vf greater(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf v) {
  float lanes[W], total = 0;
  store(lanes, v);
#pragma GCC unroll 16
  for (int i = W / 2; i > 0; i /= 2)
    for (int j = 0; j < i; j++) lanes[j] += lanes[j + i];
  total = lanes[0];
  return total;
}

inline float most(vf v) {
  float lanes[W];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < W; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

inline vf widen(const float* from) { return load<vf>(from); }

inline vf widen(const bf16* from) {
  vu wide = __builtin_convertvector(load<vh>(from), vu) << 16;
  return (vf)wide;
}

inline vf widen(const int8_t* from) {
#if defined(__AVX2__) && !defined(OCTAVO_EMULATED) && !defined(__AVX512F__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(__builtin_convertvector(load<vc>(from), vi), vf);
#endif
}

inline void narrow(float* to, vf v) { store(to, v); }

// The bits of each lane as bf16: to nearest, ties to even; NaN stays one.
inline vu rounded(vf v) {
  const vu bits = (vu)v;
  return v == v ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (vu{} + 0x7fc0);
}

inline void narrow(bf16* to, vf v) { store(to, __builtin_convertvector(rounded(v), vh)); }

#if defined(__AVX512F__)
inline vf widen(const f16* from) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline void narrow(f16* to, vf v) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)v, 0)); }
#elif defined(__F16C__) && !defined(OCTAVO_EMULATED)
inline vf widen(const f16* from) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline void narrow(f16* to, vf v) { _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)v, 0)); }
#else
inline vf widen(const f16* from) {
  vu half = __builtin_convertvector(load<vh>(from), vu);
  vu sign = (half & 0x8000) << 16, rest = half & 0x7fff;
  // 2^112 moves the exponent's bias from 15 to 127, and normalises what was subnormal.
  vf finite = (vf)(rest << 13) * 0x1p112f;
  vu special = (rest << 13) | 0x7f800000;
  return (vf)((rest >= (vu{} + 0x7c00) ? special : (vu)finite) | sign);
}
inline void narrow(f16* to, vf v) {
  vu bits = (vu)v, sign = bits & 0x80000000u, rest = bits ^ sign;
  vf size = (vf)rest;
  // Subnormal halves: adding 0.5 leaves the value, rounded to nearest even, in the low bits.
  vu small = (vu)(size + 0.5f) - 0x3f000000u;
  vu normal = (rest - 0x38000000u + 0xfff + ((rest >> 13) & 1)) >> 13;
  vu half = size < 0x1p-14f ? small : normal;
  half = size >= 65520.0f ? (vu{} + 0x7c00) : half;
  half = v == v ? half : (vu{} + 0x7e00);
  store(to, __builtin_convertvector(half | (sign >> 16), vh));
}
#endif

// ---- functions -----------------------------------------------------------------------------------------------

// e^x within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its Taylor series to r^7. Exactly 0 below -87.3.
inline vf exponential(vf x) {
  vf y = at_most(at_least(x, -87.3f), 88.7f);
  vf n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  n = x == x ? n : vf{};  // a NaN has no integer
  vf power = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
  vf result = x < -87.3f ? vf{} : p * power;
  return x == x ? result : x;
}

inline vf hyperbolic_tangent(vf x) { return 1.0f - 2.0f / (exponential(at_most(x, 20.0f) * 2.0f) + 1.0f); }

inline vf silu(vf x) { return x / (1.0f + exponential(-x)); }

inline vf gelu_tanh(vf x) {
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// ---- transposition -------------------------------------------------------------------------------------------

#if defined(__clang__)
#define OCTAVO_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define OCTAVO_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// Swap, for all rows i without the bit D and all lanes l without it, lane l + D of row i and lane l of row i + D.
template <int D, int... L>
inline void swap_blocks(vf* rows, std::integer_sequence<int, L...>) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & D) continue;
    const vf a = rows[i], b = rows[i + D];
    rows[i] = OCTAVO_SHUFFLE(a, b, (L & D ? W + L - D : L)...);
    rows[i + D] = OCTAVO_SHUFFLE(a, b, (L & D ? W + L : L + D)...);
  }
}

// Lane j of row i becomes lane i of row j, for W rows.
inline void transpose(vf* rows) {
  const auto lanes = std::make_integer_sequence<int, W>();
  if constexpr (W > 8) swap_blocks<8>(rows, lanes);
  swap_blocks<4>(rows, lanes);
  swap_blocks<2>(rows, lanes);
  swap_blocks<1>(rows, lanes);
}

}  // namespace OCTAVO_ISA

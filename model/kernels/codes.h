// Codes of 8 and 4 bits for keys and values, as kvpool/codes.py has them, which is the oracle.
//
//   a (block, head) tile     codes [block_size, row] | scales [block_size] float16
//   a row of 8 bits          one signed byte a value; of a key, of the rotated vector
//   a row of 4 bits          byte j: value j in the low half, value j + dim / 2 in the high; sign and level of a value of
//                            the rotated vector. Levels are whole numbers, so that a shuffle of bytes makes 8 bits of
//                            4, and all that multiplies codes knows 8.
#pragma once

#include <algorithm>
#include <type_traits>

#include "program.h"
#include "simd.h"

namespace OCTAVO_ISA {

using octavo::Plane;

constexpr int DIM = 256;  // largest head

// ---- rotation ------------------------------------------------------------------------------------------------

// See kvpool/rotation.py: 1 or -1 for every value.
struct Signs {
  alignas(64) float at[DIM];
  constexpr Signs() : at{} {
    constexpr uint32_t bits[] = {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344,
                                 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89};
    for (int i = 0; i < DIM; i++) at[i] = bits[i / 32] >> (31 - i % 32) & 1 ? -1.0f : 1.0f;
  }
};
constexpr Signs SIGNS;

// Sums of lanes l and l + D, where l has not the bit D, and their differences.
template <int D, int... L>
inline vf butterfly(vf v, std::integer_sequence<int, L...>) {
  return OCTAVO_SHUFFLE(v, v, (L ^ D)...) + v * vf{(L & D ? -1.0f : 1.0f)...};
}

// Every run of `block` values times Sylvester's Hadamard matrix; `block` is a power of two and at least W.
inline void hadamard(float* x, int64_t dim, int64_t block) {
  const auto lanes = std::make_integer_sequence<int, W>();
  for (int64_t d = 0; d < dim; d += W) {
    vf v = load<vf>(x + d);
    v = butterfly<4>(butterfly<2>(butterfly<1>(v, lanes), lanes), lanes);
    if constexpr (W > 8) v = butterfly<8>(v, lanes);
    store(x + d, v);
  }
  for (int64_t h = W; h < block; h *= 2)
    for (int64_t begin = 0; begin < dim; begin += 2 * h)
      for (int64_t d = begin; d < begin + h; d += W) {
        const vf a = load<vf>(x + d), b = load<vf>(x + d + h);
        store(x + d, a + b);
        store(x + d + h, a - b);
      }
}

// x [dim] becomes R x, in place.
inline void rotate_code(float* x, int64_t dim) {
  const int64_t block = dim & -dim;
  const float norm = 1.0f / std::sqrt(float(block));
  for (int64_t d = 0; d < dim; d += W) store(x + d, load<vf>(x + d) * load<vf>(SIGNS.at + d) * norm);
  hadamard(x, dim, block);
}

inline void rotate_back(float* x, int64_t dim) {
  const int64_t block = dim & -dim;
  const float norm = 1.0f / std::sqrt(float(block));
  hadamard(x, dim, block);
  for (int64_t d = 0; d < dim; d += W) store(x + d, load<vf>(x + d) * load<vf>(SIGNS.at + d) * norm);
}

// ---- 4 bits to 8 ---------------------------------------------------------------------------------------------

constexpr int STEPS = 8;
constexpr int8_t LEVELS[2 * STEPS] = {6, 18, 31, 44, 58, 75, 96, 127, -6, -18, -31, -44, -58, -75, -96, -127};
constexpr float SPREAD = 46.47f;  // a standard deviation, in levels

#if defined(__AVX2__)
typedef uint8_t vn __attribute__((vector_size(32)));
inline vn look_up(vn nibbles) {
  const __m256i levels = _mm256_broadcastsi128_si256(load<__m128i>(LEVELS));
  return (vn)_mm256_shuffle_epi8(levels, (__m256i)nibbles);
}
#else
typedef uint8_t vn __attribute__((vector_size(16)));
inline vn look_up(vn nibbles) {
#if defined(__clang__)
  for (size_t i = 0; i < sizeof(vn); i++) nibbles[i] = uint8_t(LEVELS[nibbles[i]]);
  return nibbles;
#else
  return __builtin_shuffle(load<vn>(LEVELS), nibbles);
#endif
}
#endif

// A row of 4 bits → [dim] of 8.
inline void unpack(const uint8_t* from, int64_t dim, int8_t* to) {
  constexpr int64_t N = sizeof(vn);
  const int64_t half = dim / 2;
  if (half < N) {
    for (int64_t j = 0; j < half; j++) to[j] = LEVELS[from[j] & 15], to[j + half] = LEVELS[from[j] >> 4];
    return;
  }
  for (int64_t j = 0; j < half; j += N) {
    const int64_t at = std::min(j, half - N);  // the last vector may do again what the one before has done
    const vn packed = load<vn>(from + at);
    store(to + at, look_up(packed & 15));
    store(to + half + at, look_up(packed >> 4));
  }
}

// ---- encoding ------------------------------------------------------------------------------------------------

inline const f16* scales_of(const Plane& p, int64_t tile, int64_t block_size) {
  return (const f16*)(p.data + tile * p.tile + block_size * p.row);
}

inline f16 half_of(float x) {
  f16 lanes[W];
  narrow(lanes, splat(x));
  return lanes[0];
}

inline float float_of(f16 x) {
  f16 lanes[W] = {x};
  return widen(lanes)[0];
}

inline vf magnitude(vf v) { return (vf)((vu)v & 0x7fffffffu); }

inline void put_bytes(vi integers, void* to) { store((char*)to, __builtin_convertvector(integers, vc)); }

// x [dim] → codes; returns the scale. `broken` is NaN where a value is not finite, else 0.
inline f16 encode_bytes(const float* x, int64_t dim, float broken, int8_t* to) {
  vf top = {};
  for (int64_t d = 0; d < dim; d += W) top = greater(magnitude(load<vf>(x + d)), top);
  const f16 half = half_of(std::min(most(top) / 127.0f, 65504.0f) + broken);
  const float scale = float_of(half);
  for (int64_t d = 0; d < dim; d += W) {
    vf v = at_most(at_least(load<vf>(x + d) / scale, -127.0f), 127.0f);
    v = (v + 12582912.0f) - 12582912.0f;  // to an integer, as in `exponential`
    put_bytes(__builtin_convertvector(v == v ? v : vf{}, vi), to + d);
  }
  return half;
}

// x [dim], rotated. `unbiased`: the scale of a key.
inline f16 encode_nibbles(const float* x, int64_t dim, bool unbiased, float broken, uint8_t* to) {
  vf squares = {}, dots = {}, norms = {};
  for (int64_t d = 0; d < dim; d += W) squares += load<vf>(x + d) * load<vf>(x + d);
  const float square = sum(squares), spread = SPREAD * std::sqrt(float(dim)) / std::sqrt(square);
  uint8_t nibbles[DIM];
  for (int64_t d = 0; d < dim; d += W) {
    const vf v = load<vf>(x + d), size = magnitude(v * spread);
    vi code = {};
    vf level = splat(LEVELS[0]);
    for (int step = 1; step < STEPS; step++) {
      const vi above = size > (LEVELS[step] + LEVELS[step - 1]) / 2.0f;
      code -= above;
      level = above ? splat(LEVELS[step]) : level;
    }
    const vi negative = v < 0.0f;
    level = negative ? -level : level;
    dots += v * level;
    norms += level * level;
    put_bytes(code | (negative & STEPS), nibbles + d);
  }
  for (int64_t j = 0; j < dim / 2; j++) to[j] = uint8_t(nibbles[j] | nibbles[j + dim / 2] << 4);
  const float dot = sum(dots), scale = square == 0 ? 0 : unbiased ? square / dot : dot / sum(norms);
  return half_of(std::min(scale, 65504.0f) + broken);
}

// What the fit of keys makes of a head's key, and of the queries that read it.
inline void fit_key(const Plane& p, int64_t kv_heads, int64_t head, float* x, int64_t dim) {
  const float *shift = p.fit + head * dim, *inverse = shift + kv_heads * dim;
  for (int64_t d = 0; d < dim; d += W) store(x + d, (load<vf>(x + d) - load<vf>(shift + d)) * load<vf>(inverse + d));
}

inline void fit_query(const Plane& p, int64_t kv_heads, int64_t head, float* x, int64_t dim) {
  const float* balance = p.fit + (2 * kv_heads + head) * dim;
  for (int64_t d = 0; d < dim; d += W) store(x + d, load<vf>(x + d) * load<vf>(balance + d));
}

// The centre of keys that draw attention to themselves, among fitted and rotated ones.
inline const float* sink_of(const Plane& p, int64_t kv_heads, int64_t head, int64_t dim) {
  return p.fit + (3 * kv_heads + head) * dim;
}

// Of a fitted and rotated key that is nearer to the sink than to zero, what it has beside it. Returns whether it is.
inline bool leave_sink(const float* sink, float* x, int64_t dim) {
  vf whole = {}, left = {};
  for (int64_t d = 0; d < dim; d += W) {
    const vf v = load<vf>(x + d), rest = v - load<vf>(sink + d);
    whole += v * v;
    left += rest * rest;
  }
  if (!(sum(left) < sum(whole))) return false;
  for (int64_t d = 0; d < dim; d += W) store(x + d, load<vf>(x + d) - load<vf>(sink + d));
  return true;
}

// x [dim], a key or a value of a head, becomes codes in a slot of a block. Keys and 4-bit values are left rotated.
inline void write_codes(const Plane& p, int64_t block, int64_t kv_heads, int64_t head, int64_t block_size, int64_t slot,
                        float* x, int64_t dim, bool key) {
  const int64_t tile = block * kv_heads + head;
  char* to = p.data + tile * p.tile + slot * p.row;
  vf broken = {};
  for (int64_t d = 0; d < dim; d += W) broken += load<vf>(x + d) - load<vf>(x + d);
  if (p.fit) fit_key(p, kv_heads, head, x, dim);
  if (key || p.bits == 4) rotate_code(x, dim);
  const bool sinks = p.fit && leave_sink(sink_of(p, kv_heads, head, dim), x, dim);
  f16 scale = p.bits == 4 ? encode_nibbles(x, dim, key, sum(broken), (uint8_t*)to)
                          : encode_bytes(x, dim, sum(broken), (int8_t*)to);
  if (sinks) scale = half_of(-std::max(float_of(scale), 0x1p-24f));
  ((f16*)scales_of(p, tile, block_size))[slot] = scale;
}

}  // namespace OCTAVO_ISA

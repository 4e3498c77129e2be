// y = x W^T for a few to a few hundred rows of x: the register tiles that read a weight's panels.
//
// Every output is one chain of additions over the inputs in their order, whatever the number of rows: a request's
// numbers do not depend on who else is in the step.
#pragma once

#include "panels.h"

namespace OCTAVO_ISA {

struct Floats {  // f32
  static void weights(const char* panel, int64_t k, vf& a, vf& b) {
    const float* from = (const float*)panel + k * PANEL;
    a = load<vf>(from), b = load<vf>(from + W);
  }
};

struct Halves {  // f16
  static void weights(const char* panel, int64_t k, vf& a, vf& b) {
    const f16* from = (const f16*)panel + k * PANEL;
    a = widen(from), b = widen(from + W);
  }
};

struct Brains {  // bf16
  static void weights(const char* panel, int64_t k, vf& a, vf& b) {
    vu both = load<vu>((const uint32_t*)panel + k * W);
    a = (vf)(both & 0xffff0000u), b = (vf)(both << 16);
  }
};

// M rows times P panels of float weights → tile [M][P * PANEL].
template <class Weights, int M, int P>
inline void multiply(const float* x, int64_t stride, const char* panel, int64_t bytes, int64_t inputs, float* tile) {
  vf total[M][2 * P] = {};
  for (int64_t k = 0; k < inputs; k++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      vf a, b;
      Weights::weights(panel + p * bytes, k, a, b);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        vf value = splat(x[m * stride + k]);
        total[m][2 * p] += value * a;
        total[m][2 * p + 1] += value * b;
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < 2 * P; j++) store(tile + (m * 2 * P + j) * W, total[m][j]);
}

// Adds, lane by lane, the product of two pairs of bf16.
inline vf dot_pairs(vf total, vu w, uint32_t x) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(int(x)), (__m512bh)w);
#else
  vu both = vu{} + x;
  return total + (vf)(both << 16) * (vf)(w << 16) + (vf)(both & 0xffff0000u) * (vf)(w & 0xffff0000u);
#endif
}

// As `multiply`, for bf16 where the processor multiplies it: x [M, stride bytes].
template <int M, int P>
inline void multiply_pairs(const char* x, int64_t stride, const char* panel, int64_t bytes, int64_t inputs,
                           float* tile) {
  vf total[M][2 * P] = {};
  for (int64_t k = 0; k < pairs(inputs); k++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const uint32_t* from = (const uint32_t*)(panel + p * bytes) + k * PANEL;
      const vu a = load<vu>(from), b = load<vu>(from + W);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        uint32_t pair;
        std::memcpy(&pair, x + m * stride + k * 4, 4);
        total[m][2 * p] = dot_pairs(total[m][2 * p], a, pair);
        total[m][2 * p + 1] = dot_pairs(total[m][2 * p + 1], b, pair);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < 2 * P; j++) store(tile + (m * 2 * P + j) * W, total[m][j]);
}

// A vector of int8 weights, as the multiply-add wants it; and the sum that a pair of inputs adds, lane by lane.
#if defined(__AVX512VNNI__)
typedef __m512i Integers;  // a pair of inputs a lane
inline Integers integers(const int8_t* from) { return _mm512_cvtepi8_epi16(load<__m256i>(from)); }
inline vi dot(vi total, Integers w, int32_t x) { return (vi)_mm512_dpwssd_epi32((__m512i)total, w, _mm512_set1_epi32(x)); }
#elif defined(__AVX2__) && !defined(OCTAVO_EMULATED)
typedef __m256i Integers;
inline Integers integers(const int8_t* from) { return _mm256_cvtepi8_epi16(load<__m128i>(from)); }
inline vi dot(vi total, Integers w, int32_t x) { return total + (vi)_mm256_madd_epi16(w, _mm256_set1_epi32(x)); }
#else
struct Integers {
  vi even, odd;
};
inline Integers integers(const int8_t* from) {
  vi pairs = __builtin_convertvector(load<vh>(from), vi);
  return {pairs << 24 >> 24, pairs << 16 >> 24};
}
inline vi dot(vi total, Integers w, int32_t x) { return total + w.even * int16_t(x) + w.odd * (x >> 16); }
#endif

// The same of int4, for a panel's first and second outputs; see int4.h.
#if defined(__AVX512VNNI__)
inline void halves(const uint8_t* from, Integers& a, Integers& b) {
  const Integers words = _mm512_cvtepu8_epi16(load<__m256i>(from));
  a = _mm512_and_si512(words, _mm512_set1_epi16(15)), b = _mm512_srli_epi16(words, 4);
}
#elif defined(__AVX2__) && !defined(OCTAVO_EMULATED)
inline void halves(const uint8_t* from, Integers& a, Integers& b) {
  const Integers words = _mm256_cvtepu8_epi16(load<__m128i>(from));
  a = _mm256_and_si256(words, _mm256_set1_epi16(15)), b = _mm256_srli_epi16(words, 4);
}
#else
inline void halves(const uint8_t* from, Integers& a, Integers& b) {
  const vi pairs = __builtin_convertvector(load<vh>(from), vi), first = pairs & 0xff, second = pairs >> 8;
  a = {first & 15, second & 15}, b = {first >> 4, second >> 4};
}
#endif

// As `multiply`, for int8: x [M, stride bytes], scaled by `x_scales` [M].
template <int M, int P>
inline void multiply_int8(const char* x, int64_t stride, const float* x_scales, const Matrix& m, int64_t panel,
                          float* tile) {
  const int64_t bytes = panel_bytes(Kind::int8, m.inputs), count = pairs(m.inputs);
  const int8_t* weights = (const int8_t*)m.data + panel * bytes;
  vi total[M][2 * P] = {};
  for (int64_t k = 0; k < count; k++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const int8_t* from = weights + p * bytes + k * PANEL * 2;
      const Integers a = integers(from), b = integers(from + W * 2);
#pragma GCC unroll 12
      for (int r = 0; r < M; r++) {
        int32_t pair;  // of one row's inputs
        std::memcpy(&pair, x + r * stride + k * 4, 4);
        total[r][2 * p] = dot(total[r][2 * p], a, pair);
        total[r][2 * p + 1] = dot(total[r][2 * p + 1], b, pair);
      }
    }
  }
  for (int r = 0; r < M; r++)
    for (int j = 0; j < 2 * P; j++) {
      const int64_t lane = panel * PANEL + j * W;
      vf value = __builtin_convertvector(total[r][j], vf) * (load<vf>(m.scales + lane) * x_scales[r]);
      store(tile + (r * 2 * P + j) * W, value);
    }
}

// As `multiply_int8`, for int4: integers within a group, floats from group to group.
template <int M, int P>
inline void multiply_int4(const char* x, int64_t stride, const float* x_scales, const Matrix& m, int64_t panel,
                          float* tile) {
  const int64_t bytes = panel_bytes(Kind::int4, m.inputs), count = groups(m.inputs);
  const char* sums = x + count * GROUP * sizeof(Activated);
  vf total[M][2 * P] = {};
  for (int64_t g = 0; g < count; g++) {
    const uint8_t* group = (const uint8_t*)m.data + panel * bytes + g * GROUP_BYTES;
    vi inner[M][2 * P] = {};
    for (int64_t i = 0; i < GROUP / 2; i++) {
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        Integers a, b;
        halves(group + p * bytes + (4 + i) * PANEL, a, b);
#pragma GCC unroll 12
        for (int r = 0; r < M; r++) {
          int32_t pair;  // of one row's inputs
          std::memcpy(&pair, x + r * stride + (g * GROUP / 2 + i) * 4, 4);
          inner[r][2 * p] = dot(inner[r][2 * p], a, pair);
          inner[r][2 * p + 1] = dot(inner[r][2 * p + 1], b, pair);
        }
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < 2 * P; j++) {
      const f16* scales = (const f16*)(group + j / 2 * bytes) + j % 2 * W;
      const vf scale = widen(scales), low = widen(scales + PANEL);
#pragma GCC unroll 12
      for (int r = 0; r < M; r++) {
        float sum;
        std::memcpy(&sum, sums + r * stride + g * 4, 4);
        total[r][j] += __builtin_convertvector(inner[r][j], vf) * scale;
        total[r][j] += low * sum;
      }
    }
  }
  for (int r = 0; r < M; r++)
    for (int j = 0; j < 2 * P; j++) store(tile + (r * 2 * P + j) * W, total[r][j] * x_scales[r]);
}

template <int M, int P>
inline void tile_of(const Matrix& m, const Operand& x, int64_t row, int64_t panel, float* tile) {
  const int64_t bytes = panel_bytes(m.kind, m.inputs);
  const char* weights = (const char*)m.data + panel * bytes;
  const float* rows = x.rows + row * x.stride;
  const int64_t stride = encoded_bytes(m.kind, m.inputs);
  const char* encoded = (const char*)x.encoded + row * stride;
  switch (m.kind) {
    case Kind::f32: return multiply<Floats, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::f16: return multiply<Halves, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::bf16:
      if constexpr (BF16_PAIRS) return multiply_pairs<M, P>(encoded, stride, weights, bytes, m.inputs, tile);
      else return multiply<Brains, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::int8: return multiply_int8<M, P>(encoded, stride, x.scales + row, m, panel, tile);
    case Kind::int4: return multiply_int4<M, P>(encoded, stride, x.scales + row, m, panel, tile);
  }
}

template <int P, int M>
inline void tile_of(const Matrix& m, const Operand& x, int64_t row, int rows, int64_t panel, float* tile) {
  if constexpr (M > 0) {
    if (rows == M) return tile_of<M, P>(m, x, row, panel, tile);
    tile_of<P, M - 1>(m, x, row, rows, panel, tile);
  }
}

// Panels [first, last) for all `count` rows; `finish(row, panel, values [PANEL])` takes each result, bias added.
template <class Finish>
inline void multiply_panels(const Matrix& m, const Operand& x, int64_t count, int64_t first, int64_t last,
                            Finish finish) {
  alignas(64) float tile[ROWS * PANEL];
  const int wide = m.tiles.of(count), most = ROWS / wide;
  const int64_t blocks = (count + most - 1) / most;
  for (int64_t panel = first; panel < last;) {
    const int width = panel + wide > last ? 1 : wide;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = count * block / blocks;
      const int rows = int(count * (block + 1) / blocks - row);
      if (width == 4)
        tile_of<4, ROWS / 4>(m, x, row, rows, panel, tile);
      else if (width == 2)
        tile_of<2, ROWS / 2>(m, x, row, rows, panel, tile);
      else
        tile_of<1, ROWS>(m, x, row, rows, panel, tile);
      for (int r = 0; r < rows; r++)
        for (int p = 0; p < width; p++) {
          float* values = tile + (r * width + p) * PANEL;
          if (m.bias)
            for (int j = 0; j < PANEL; j += W)
              store(values + j, load<vf>(values + j) + load<vf>(m.bias + (panel + p) * PANEL + j));
          finish(row + r, panel + p, values);
        }
    }
    panel += width;
  }
}

}  // namespace OCTAVO_ISA

// y = x W^T for a few to a few hundred rows of x: the panels that a weight is packed in, and the tiles that read them.
//
// A panel holds 2 W outputs, all inputs: what one register tile of ROWS rows needs, in the order in which it needs it.
//
//   f32, f16   [inputs][2 W]
//   bf16       [inputs][W] words: output j in the high half, output j + W in the low, so that a mask and a shift widen
//   bf16, where the processor multiplies it   [inputs / 2][2 W][2]; activations are rounded to bf16 too
//   int8       [inputs / 2][2 W][2]: pairs of inputs for the multiply-add of 16-bit pairs. VNNI multiplies groups of four
//              bytes too, but 8-bit activations with one scale a row cost a model several percent of its perplexity
//
// Every output is one chain of additions over the inputs in their order, whatever the number of rows: a request's
// numbers do not depend on who else is in the step.
#pragma once

#include <algorithm>

#include "program.h"
#include "simd.h"

namespace OCTAVO_ISA {

using octavo::Kind;
using octavo::Matrix;
using octavo::Operand;

constexpr int PANEL = 2 * W;

typedef int16_t Activated;  // beside int8 weights

#if defined(OCTAVO_BF16)
constexpr bool BF16_PAIRS = true;
#else
constexpr bool BF16_PAIRS = false;
#endif

inline int64_t pairs(int64_t inputs) { return (inputs + 1) / 2; }

inline int64_t panel_bytes(Kind kind, int64_t inputs) {
  switch (kind) {
    case Kind::f32: return inputs * PANEL * 4;
    case Kind::f16: return inputs * PANEL * 2;
    case Kind::bf16: return (BF16_PAIRS ? 2 * pairs(inputs) : inputs) * PANEL * 2;
    default: return 2 * pairs(inputs) * PANEL;
  }
}

// Of a row of activations in the form that the kind multiplies; 0: as float32.
inline int64_t encoded_bytes(Kind kind, int64_t inputs) {
  int64_t bytes = 0;
  if (kind == Kind::int8 || (kind == Kind::bf16 && BF16_PAIRS)) bytes = 4 * pairs(inputs);
  return (bytes + 63) / 64 * 64;
}

// ---- packing -------------------------------------------------------------------------------------------------

// The row of the weight that lane `lane` of panel `panel` holds, or -1 for padding.
inline int64_t source_row(const Matrix& m, int64_t panel, int lane) {
  if (!m.gated) {
    int64_t row = panel * PANEL + lane;
    return row < m.outputs ? row : -1;
  }
  int64_t row = panel * W + lane % W;
  return row < m.outputs ? row + (lane < W ? 0 : m.outputs) : -1;
}

inline int64_t panel_count(bool gated, int64_t outputs) {
  int64_t width = gated ? W : PANEL;
  return (outputs + width - 1) / width;
}

inline void pack_int8(const Matrix& m, int64_t at, int lane, const float* row, int8_t* to) {
  float high = 0;
  for (int64_t k = 0; k < m.inputs; k++) high = std::max(high, std::fabs(row[k]));
  const float scale = high / 127.0f;
  for (int64_t k = 0; k < 2 * pairs(m.inputs); k++) {
    const int8_t integer = k < m.inputs && scale > 0 ? int8_t(std::lrint(row[k] / scale)) : 0;
    to[(k / 2 * PANEL + lane) * 2 + k % 2] = integer;
  }
  m.scales[at] = scale;
}

// Two vectors of outputs for inputs k and, where bf16 goes in pairs, k + 1.
inline void put(const Matrix& m, char* to, int64_t k, const vf* a, const vf* b) {
  switch (m.kind) {
    case Kind::f32: store((float*)to + k * PANEL, *a), store((float*)to + k * PANEL + W, *b); break;
    case Kind::f16: narrow((f16*)to + k * PANEL, *a), narrow((f16*)to + k * PANEL + W, *b); break;
    case Kind::bf16:
      if (BF16_PAIRS) {
        if (k % 2) break;
        uint32_t* words = (uint32_t*)to + k / 2 * PANEL;
        store(words, rounded(a[1]) << 16 | rounded(a[0])), store(words + W, rounded(b[1]) << 16 | rounded(b[0]));
      } else {
        store((uint32_t*)to + k * W, rounded(*a) << 16 | rounded(*b));
      }
      break;
    case Kind::int8: break;
  }
}

// Fill a panel from float32 rows [PANEL, stride], zero where there is no such row or input; `stride` is a multiple of W
// and no less than the inputs.
inline void pack_panel(const Matrix& m, int64_t panel, const float* rows, int64_t stride) {
  char* to = (char*)m.data + panel * panel_bytes(m.kind, m.inputs);
  if (m.kind == Kind::int8) {
    for (int lane = 0; lane < PANEL; lane++)
      pack_int8(m, panel * PANEL + lane, lane, rows + lane * stride, (int8_t*)to);
    return;
  }
  for (int64_t k = 0; k < m.inputs; k += W) {
    vf a[W], b[W];
    for (int lane = 0; lane < W; lane++)
      a[lane] = load<vf>(rows + lane * stride + k), b[lane] = load<vf>(rows + (W + lane) * stride + k);
    transpose(a), transpose(b);
    for (int i = 0; i < W && k + i < m.inputs; i++) put(m, to, k + i, a + i, b + i);
  }
}

// ---- tiles ---------------------------------------------------------------------------------------------------

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

// Rows of activations → what `multiply_int8` reads, with one scale a row. `inputs` values; returns the scale.
inline float encode_row(const float* x, int64_t inputs, Activated* to) {
  vf high = {}, zero = {};
  int64_t k = 0;
  for (; k + W <= inputs; k += W) {
    vf v = load<vf>(x + k);
    zero += v * 0.0f;  // NaN where a value is not finite
    high = greater(v < 0.0f ? -v : v, high);
  }
  float top = most(high), finite = sum(zero);
  for (; k < inputs; k++) top = std::max(top, std::fabs(x[k])), finite += x[k] * 0.0f;
  // A sum over all inputs must fit 32 bits.
  const float range = float(std::min<int64_t>(32767, 0x7fffffffLL / (127 * inputs)));
  const float scale = top / range, inverse = top > 0 ? range / top : 0.0f;
  const auto whole = [&](auto value) { return value * inverse + 12582912.0f; };  // 1.5 * 2^23: low bits, to nearest
  for (k = 0; k + W <= inputs; k += W) store(to + k, __builtin_convertvector((vu)whole(load<vf>(x + k)), vh));
  for (; k < inputs; k++) {
    const float moved = whole(x[k]);
    std::memcpy(to + k, &moved, sizeof *to);
  }
  for (; k < 2 * pairs(inputs); k++) to[k] = 0;
  return finite == 0.0f ? scale : NAN;
}

template <class Half>
inline Half narrowed(float value) {
  float many[W] = {value};
  Half half[W];
  narrow(half, load<vf>(many));
  return half[0];
}

// A row of `x` in the form that `m` multiplies, where that is not float32.
inline void encode(const Matrix& m, const Operand& x, int64_t row) {
  const float* from = x.rows + row * x.stride;
  char* to = (char*)x.encoded + row * encoded_bytes(m.kind, m.inputs);
  if (m.kind == Kind::int8) x.scales[row] = encode_row(from, m.inputs, (Activated*)to);
  if (m.kind == Kind::bf16 && BF16_PAIRS) {
    int64_t k = 0;
    for (; k + W <= m.inputs; k += W) narrow((bf16*)to + k, load<vf>(from + k));
    for (; k < 2 * pairs(m.inputs); k++) ((bf16*)to)[k] = narrowed<bf16>(k < m.inputs ? from[k] : 0.0f);
  }
}

template <int M, int P>
inline void tile_of(const Matrix& m, const Operand& x, int64_t row, int64_t panel, float* tile) {
  const int64_t bytes = panel_bytes(m.kind, m.inputs);
  const char* weights = (const char*)m.data + panel * bytes;
  const float* rows = x.rows + row * x.stride;
  switch (m.kind) {
    case Kind::f32: return multiply<Floats, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::f16: return multiply<Halves, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::bf16:
      if constexpr (BF16_PAIRS) {
        const int64_t stride = encoded_bytes(m.kind, m.inputs);
        const char* encoded = (const char*)x.encoded + row * stride;
        return multiply_pairs<M, P>(encoded, stride, weights, bytes, m.inputs, tile);
      } else {
        return multiply<Brains, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
      }
    case Kind::int8: {
      const int64_t stride = encoded_bytes(m.kind, m.inputs);
      const char* encoded = (const char*)x.encoded + row * stride;
      return multiply_int8<M, P>(encoded, stride, x.scales + row, m, panel, tile);
    }
  }
}

template <int P, int M>
inline void tile_of(const Matrix& m, const Operand& x, int64_t row, int rows, int64_t panel, float* tile) {
  if constexpr (M > 0) {
    if (rows == M) return tile_of<M, P>(m, x, row, panel, tile);
    tile_of<P, M - 1>(m, x, row, rows, panel, tile);
  }
}

// Panels of a tile: with few rows it has several, to keep enough additions under way.
inline int together(int64_t rows) { return rows == 1 ? 4 : rows <= ROWS / 2 ? 2 : 1; }

// Panels [first, last) for all `count` rows; `finish(row, panel, values [PANEL])` takes each result, bias added.
template <class Finish>
inline void multiply_panels(const Matrix& m, const Operand& x, int64_t count, int64_t first, int64_t last,
                            Finish finish) {
  alignas(64) float tile[ROWS * PANEL];
  const int64_t blocks = (count + ROWS - 1) / ROWS;
  for (int64_t panel = first; panel < last;) {
    const int width = panel + together(count) > last ? 1 : together(count);
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = count * block / blocks;
      const int rows = int(count * (block + 1) / blocks - row);
      if (width == 4)
        tile_of<1, 4>(m, x, row, panel, tile);
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

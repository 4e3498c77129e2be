// y = x W^T for a few to a few hundred rows of x: the panels that a weight is packed in, and the tiles that read them.
//
// A panel holds 2 W outputs, all inputs: what one register tile of ROWS rows needs, in the order in which it needs it.
//
//   f32, f16   [inputs][2 W]
//   bf16       [inputs][W] words: output j in the high half, output j + W in the low, so that a mask and a shift widen
//   int8       [inputs / 2][2 W][2]: pairs of inputs for the multiply-add of 16-bit pairs
//   int8, VNNI [inputs / 4][2 W][4]
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

#if defined(__AVX512VNNI__)
constexpr int GROUP = 4;  // inputs that one instruction multiplies and adds
typedef uint8_t Activated;
#else
constexpr int GROUP = 2;
typedef int16_t Activated;
#endif

inline int64_t groups(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

inline int64_t panel_bytes(Kind kind, int64_t inputs) {
  switch (kind) {
    case Kind::f32: return inputs * PANEL * 4;
    case Kind::int8: return groups(inputs) * GROUP * PANEL;
    default: return inputs * PANEL * 2;
  }
}

inline int64_t encoded_bytes(Kind kind, int64_t inputs) {
  return kind == Kind::int8 ? (groups(inputs) * GROUP * int64_t(sizeof(Activated)) + 63) / 64 * 64 : 0;
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

// Fill a panel from float32 rows; `weight` [rows, inputs], whose row r is that of the whole weight's lane r, or absent.
inline void pack_panel(const Matrix& m, int64_t panel, const float* weight) {
  const int64_t inputs = m.inputs;
  char* to = (char*)m.data + panel * panel_bytes(m.kind, inputs);
  for (int lane = 0; lane < PANEL; lane++) {
    const float* row = source_row(m, panel, lane) < 0 ? nullptr : weight + lane * inputs;
    float scale = 0;
    if (m.kind == Kind::int8) {
      float high = 0;
      for (int64_t k = 0; row && k < inputs; k++) high = std::max(high, std::fabs(row[k]));
      scale = high / 127.0f;
      m.scales[panel * PANEL + lane] = scale;
      m.sums[panel * PANEL + lane] = 0;
    }
    for (int64_t k = 0; k < groups(inputs) * GROUP; k++) {
      float value = row && k < inputs ? row[k] : 0.0f;
      if (m.kind == Kind::int8) {
        int8_t integer = scale > 0 ? int8_t(std::lrint(value / scale)) : 0;
        ((int8_t*)to)[(k / GROUP * PANEL + lane) * GROUP + k % GROUP] = integer;
        m.sums[panel * PANEL + lane] += integer;
        continue;
      }
      if (k >= inputs) break;
      if (m.kind == Kind::f32) ((float*)to)[k * PANEL + lane] = value;
      if (m.kind == Kind::f16 || m.kind == Kind::bf16) {
        float many[W] = {value};
        if (m.kind == Kind::f16) {
          f16 half[W];
          narrow(half, load<vf>(many));
          ((f16*)to)[k * PANEL + lane] = half[0];
        } else {
          bf16 half[W];
          narrow(half, load<vf>(many));
          ((bf16*)to)[(k * W + lane % W) * 2 + (lane < W ? 1 : 0)] = half[0];
        }
      }
    }
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

// A vector of int8 weights, as the multiply-add wants it; and the sum that a group of inputs adds, lane by lane.
#if defined(__AVX512VNNI__)
typedef __m512i Integers;
inline Integers integers(const int8_t* from) { return load<__m512i>(from); }
inline vi dot(vi total, Integers w, int32_t x) { return (vi)_mm512_dpbusd_epi32((__m512i)total, _mm512_set1_epi32(x), w); }
#elif defined(__AVX512BW__)
typedef __m512i Integers;
inline Integers integers(const int8_t* from) { return _mm512_cvtepi8_epi16(load<__m256i>(from)); }
inline vi dot(vi total, Integers w, int32_t x) { return total + (vi)_mm512_madd_epi16(w, _mm512_set1_epi32(x)); }
#elif defined(__AVX2__)
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
  const int64_t bytes = panel_bytes(Kind::int8, m.inputs), count = groups(m.inputs);
  const int8_t* weights = (const int8_t*)m.data + panel * bytes;
  vi total[M][2 * P] = {};
  for (int64_t g = 0; g < count; g++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const int8_t* from = weights + p * bytes + g * PANEL * GROUP;
      const Integers a = integers(from), b = integers(from + W * GROUP);
#pragma GCC unroll 12
      for (int r = 0; r < M; r++) {
        int32_t group;  // GROUP inputs of one row
        std::memcpy(&group, x + r * stride + g * 4, 4);
        total[r][2 * p] = dot(total[r][2 * p], a, group);
        total[r][2 * p + 1] = dot(total[r][2 * p + 1], b, group);
      }
    }
  }
  for (int r = 0; r < M; r++)
    for (int j = 0; j < 2 * P; j++) {
      const int64_t lane = panel * PANEL + j * W;
#if defined(__AVX512VNNI__)
      total[r][j] -= load<vi>(m.sums + lane) * 128;  // activations are stored 128 too high
#endif
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
  // A sum over all inputs must fit 32 bits. Where pairs of 16 bits are multiplied that leaves more than 8 bits.
  const float range = GROUP == 4 ? 127.0f : float(std::min<int64_t>(32767, 0x7fffffffLL / (127 * inputs)));
  const float scale = top / range, inverse = top > 0 ? range / top : 0.0f;
  const int shift = GROUP == 4 ? 128 : 0;
  for (k = 0; k < inputs; k++) {
    float moved = x[k] * inverse + 12582912.0f;  // 1.5 * 2^23: the integer, to nearest, is in the low bits
    int32_t bits;
    std::memcpy(&bits, &moved, 4);
    to[k] = Activated((bits - 0x4b400000) + shift);
  }
  for (; k < groups(inputs) * GROUP; k++) to[k] = Activated(shift);
  return finite == 0.0f ? scale : NAN;
}

template <int M, int P>
inline void tile_of(const Matrix& m, const Operand& x, int64_t row, int64_t panel, float* tile) {
  const int64_t bytes = panel_bytes(m.kind, m.inputs);
  const char* weights = (const char*)m.data + panel * bytes;
  const float* rows = x.rows + row * x.stride;
  switch (m.kind) {
    case Kind::f32: return multiply<Floats, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::f16: return multiply<Halves, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::bf16: return multiply<Brains, M, P>(rows, x.stride, weights, bytes, m.inputs, tile);
    case Kind::int8: {
      const int64_t stride = encoded_bytes(m.kind, m.inputs);
      return multiply_int8<M, P>((const char*)x.encoded + row * stride, stride, x.scales + row, m, panel, tile);
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

// Panels [first, last) for all `count` rows; `finish(row, panel, values [PANEL])` takes each result, bias added.
template <class Finish>
inline void multiply_panels(const Matrix& m, const Operand& x, int64_t count, int64_t first, int64_t last,
                            Finish finish) {
  alignas(64) float tile[ROWS * PANEL];
  const int64_t blocks = (count + ROWS - 1) / ROWS;
  for (int64_t panel = first; panel < last;) {
    // With few rows a tile has several panels, to keep enough additions under way.
    int together = count == 1 ? 4 : count <= ROWS / 2 ? 2 : 1;
    if (panel + together > last) together = 1;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = count * block / blocks;
      const int rows = int(count * (block + 1) / blocks - row);
      if (together == 4)
        tile_of<1, 4>(m, x, row, panel, tile);
      else if (together == 2)
        tile_of<2, ROWS / 2>(m, x, row, rows, panel, tile);
      else
        tile_of<1, ROWS>(m, x, row, rows, panel, tile);
      for (int r = 0; r < rows; r++)
        for (int p = 0; p < together; p++) {
          float* values = tile + (r * together + p) * PANEL;
          if (m.bias)
            for (int j = 0; j < PANEL; j += W)
              store(values + j, load<vf>(values + j) + load<vf>(m.bias + (panel + p) * PANEL + j));
          finish(row + r, panel + p, values);
        }
    }
    panel += together;
  }
}

}  // namespace OCTAVO_ISA

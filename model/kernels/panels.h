// The panels that a weight is packed in, and the form that a row of activations takes beside it.
//
// A panel holds 2 W outputs, all inputs: what one register tile needs, in the order in which it needs it.
//
//   f32, f16   [inputs][2 W]
//   bf16       [inputs][W] words: output j in the high half, output j + W in the low, so that a mask and a shift widen
//   bf16, where the processor multiplies it   [inputs / 2][2 W][2]; activations are rounded to bf16 too
//   int8       [inputs / 2][2 W][2]: pairs of inputs for the multiply-add of 16-bit pairs. VNNI multiplies groups of four
//              bytes too, but 8-bit activations with one scale a row cost a model several percent of its perplexity
//   int4       [inputs / 32] groups, each with its scales: see int4.h; activations as beside int8
#pragma once

#include <algorithm>

#include "int4.h"
#include "program.h"

namespace OCTAVO_ISA {

using octavo::Kind;
using octavo::Matrix;
using octavo::Operand;

constexpr int PANEL = 2 * W;

typedef int16_t Activated;  // beside int8 and int4 weights

#if defined(OCTAVO_BF16)
constexpr bool BF16_PAIRS = true;
#else
constexpr bool BF16_PAIRS = false;
#endif

constexpr int64_t GROUP_BYTES = (4 + GROUP / 2) * PANEL;  // of a panel's int4 weights

inline int64_t pairs(int64_t inputs) { return (inputs + 1) / 2; }

inline int64_t panel_bytes(Kind kind, int64_t inputs) {
  switch (kind) {
    case Kind::f32: return inputs * PANEL * 4;
    case Kind::f16: return inputs * PANEL * 2;
    case Kind::bf16: return (BF16_PAIRS ? 2 * pairs(inputs) : inputs) * PANEL * 2;
    case Kind::int8: return 2 * pairs(inputs) * PANEL;
    case Kind::int4: return groups(inputs) * GROUP_BYTES;
  }
}

// Of a row of activations in the form that the kind multiplies; 0: as float32. Beside int4 weights each group's sum, a
// float, stands behind the integers.
inline int64_t encoded_bytes(Kind kind, int64_t inputs) {
  int64_t bytes = 0;
  if (kind == Kind::int8 || (kind == Kind::bf16 && BF16_PAIRS)) bytes = 4 * pairs(inputs);
  if (kind == Kind::int4) bytes = groups(inputs) * (GROUP * sizeof(Activated) + sizeof(float));
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
  float high = 0, broken = 0;
  for (int64_t k = 0; k < m.inputs; k++) high = std::max(high, std::fabs(row[k])), broken += row[k] * 0.0f;
  const float scale = high / 127.0f + broken;  // NaN where a weight is not finite
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
    default: break;  // packed elsewhere
  }
}

// Inputs k to k + W of W rows, one vector an input.
inline void columns(const float* rows, int64_t stride, int64_t k, vf* to) {
  for (int lane = 0; lane < W; lane++) to[lane] = load<vf>(rows + lane * stride + k);
  transpose(to);
}

inline void pack_int4(const Matrix& m, const float* rows, int64_t stride, uint8_t* to) {
  for (int64_t k = 0; k < m.inputs; k += GROUP)
    for (int half = 0; half < 2; half++) {
      vf x[GROUP];
      for (int64_t i = 0; i < GROUP && k + i < m.inputs; i += W) columns(rows + half * W * stride, stride, k + i, x + i);
      pack_fours(x, std::min(GROUP, m.inputs - k), half, to + k / GROUP * GROUP_BYTES);
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
  if (m.kind == Kind::int4) return pack_int4(m, rows, stride, (uint8_t*)to);
  for (int64_t k = 0; k < m.inputs; k += W) {
    vf a[W], b[W];
    columns(rows, stride, k, a), columns(rows + W * stride, stride, k, b);
    for (int i = 0; i < W && k + i < m.inputs; i++) put(m, to, k + i, a + i, b + i);
  }
}

// ---- activations ---------------------------------------------------------------------------------------------

// A row of activations as integers up to `range`, zero from `inputs` to `padded`; returns their scale.
inline float encode_row(const float* x, int64_t inputs, int64_t padded, float range, Activated* to) {
  vf high = {}, zero = {};
  int64_t k = 0;
  for (; k + W <= inputs; k += W) {
    vf v = load<vf>(x + k);
    zero += v * 0.0f;  // NaN where a value is not finite
    high = greater(v < 0.0f ? -v : v, high);
  }
  float top = most(high), finite = sum(zero);
  for (; k < inputs; k++) top = std::max(top, std::fabs(x[k])), finite += x[k] * 0.0f;
  const float scale = top / range, inverse = top > 0 ? range / top : 0.0f;
  const auto whole = [&](auto value) { return value * inverse + 12582912.0f; };  // 1.5 * 2^23: low bits, to nearest
  for (k = 0; k + W <= inputs; k += W) store(to + k, __builtin_convertvector((vu)whole(load<vf>(x + k)), vh));
  for (; k < inputs; k++) {
    const float moved = whole(x[k]);
    std::memcpy(to + k, &moved, sizeof *to);
  }
  for (; k < padded; k++) to[k] = 0;
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
  if (m.kind == Kind::int8) {
    const int64_t range = std::min<int64_t>(32767, 0x7fffffff / (127 * m.inputs));  // a sum of all inputs fits 32 bits
    x.scales[row] = encode_row(from, m.inputs, 2 * pairs(m.inputs), float(range), (Activated*)to);
  }
  if (m.kind == Kind::int4) {
    const int64_t padded = groups(m.inputs) * GROUP;
    const Activated* integers = (Activated*)to;
    float* sums = (float*)(integers + padded);
    x.scales[row] = encode_row(from, m.inputs, padded, 32767.0f, (Activated*)to);  // a sum of a group fits 24 bits
    for (int64_t k = 0; k < padded; k += GROUP) {
      int32_t total = 0;
      for (int64_t i = 0; i < GROUP; i++) total += integers[k + i];
      sums[k / GROUP] = float(total);
    }
  }
  if (m.kind == Kind::bf16 && BF16_PAIRS) {
    int64_t k = 0;
    for (; k + W <= m.inputs; k += W) narrow((bf16*)to + k, load<vf>(from + k));
    for (; k < 2 * pairs(m.inputs); k++) ((bf16*)to)[k] = narrowed<bf16>(k < m.inputs ? from[k] : 0.0f);
  }
}

}  // namespace OCTAVO_ISA

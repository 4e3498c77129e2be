// Attention of some lanes over a span of keys, few lanes or many: see attention.h.
//
// Codes are multiplied as whole numbers: a key's scale multiplies its scores, a value's scale what its scores have become.
// A key's scale below zero says that its scores lack the query's with the sink (kvpool/fit.py).
#pragma once

#include <vector>

#include "tiles.h"

namespace OCTAVO_ISA {

constexpr int LANES = 48;   // most lanes of an item
constexpr int FEW = 4;      // up to so many lanes are computed one by one

// Everything an item needs besides: one of these per thread.
struct Scratch {
  alignas(64) float query[DIM * LANES];   // few: [lane][dim]; many: [dim][lane]
  alignas(64) float key[KEYS * DIM];
  alignas(64) float value[KEYS * DIM];
  alignas(64) float scores[KEYS * LANES];
  alignas(64) float out[LANES * DIM];     // [lane][dim]
  alignas(64) float high[LANES], total[LANES];
  alignas(64) float row[DIM];
  alignas(64) float sink[LANES];          // each query's score with the sink
  // Of codes: the scales of a tile's keys and values, and 4 bits as 8.
  alignas(64) float key_scale[KEYS], value_scale[KEYS];
  alignas(64) int8_t keys[KEYS * DIM], values[KEYS * DIM];
};

// C [m, n] (+)= A B with B [k, n] and n a multiple of W; A(m, k) lies at a[m * am + k * ak].
template <int M, int N>
inline void product_tile(const float* a, int64_t am, int64_t ak, const float* b, int64_t bn, float* c, int64_t cn,
                         int64_t depth, bool add) {
  vf total[M][N];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) total[m][n] = add ? load<vf>(c + m * cn + n * W) : vf{};
  for (int64_t k = 0; k < depth; k++) {
    vf right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = load<vf>(b + k * bn + n * W);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      vf left = splat(a[m * am + k * ak]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) total[m][n] += left * right[n];
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store(c + m * cn + n * W, total[m][n]);
}

template <int N, int M>
inline void product_rows(const float* a, int64_t am, int64_t ak, const float* b, int64_t bn, float* c, int64_t cn,
                         int64_t rows, int64_t depth, bool add) {
  if constexpr (M > 0) {
    for (; rows >= M; rows -= M, a += M * am, c += M * cn) product_tile<M, N>(a, am, ak, b, bn, c, cn, depth, add);
    if (rows) product_rows<N, M / 2>(a, am, ak, b, bn, c, cn, rows, depth, add);
  }
}

inline void product(const float* a, int64_t am, int64_t ak, const float* b, int64_t bn, float* c, int64_t cn,
                    int64_t rows, int64_t columns, int64_t depth, bool add) {
  int64_t n = 0;
  for (; n + 2 * W <= columns; n += 2 * W)
    product_rows<2, ROWS>(a, am, ak, b + n, bn, c + n, cn, rows, depth, add);
  for (; n < columns; n += W) product_rows<1, ROWS>(a, am, ak, b + n, bn, c + n, cn, rows, depth, add);
}

// Adds to M lanes' dot products with W keys what the dims from d on say: 2 W of them, as pairs. Pairs of 16 bits are
// transposed whole, and cost no instruction but a shift and a mask to widen.
template <int M>
inline void dot_keys(const bf16* keys, const int64_t* at, const float* query, int64_t dim, int64_t d, vf (*total)[2],
                     int half) {
  vf words[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) words[i] = load<vf>(keys + at[half * W + i] + d);
  transpose(words);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    const vf even = (vf)((vu)words[i] << 16), odd = (vf)((vu)words[i] & 0xffff0000u);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      total[m][half] += even * splat(query[m * dim + d + 2 * i]);
      total[m][half] += odd * splat(query[m * dim + d + 2 * i + 1]);
    }
  }
}

// The same of 4 W dims, as codes: four are transposed as one.
template <int M>
inline void dot_codes(const int8_t* keys, const int64_t* at, const float* query, int64_t dim, int64_t d,
                      vf (*total)[2]) {
  vf words[2][W];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) words[half][i] = load<vf>(keys + at[half * W + i] + d);
    transpose(words[half]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; i++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const vf a = __builtin_convertvector((vi)((vu)words[0][i] << (24 - 8 * j)) >> 24, vf),
               b = __builtin_convertvector((vi)((vu)words[1][i] << (24 - 8 * j)) >> 24, vf);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const vf q = splat(query[m * dim + d + 4 * i + j]);
        total[m][0] += a * q;
        total[m][1] += b * q;
      }
    }
}

// scores [lane][key] of M lanes over 2 W keys. Each is one chain of additions along the head, as in `many_lanes`.
template <class Stored, int M>
inline void dots(const Stored* keys, const int64_t* at, const int64_t* ahead, const float* query, int64_t dim,
                 float* scores) {
  constexpr int TURNS = std::max(1, 64 / (W * int(sizeof(Stored))));  // that a key's line of memory lasts
  vf total[M][2] = {};
  int64_t d = 0;
  const auto fetch = [&](int64_t d) {
    for (int i = int(d / W) % TURNS; i < 2 * W; i += TURNS) __builtin_prefetch(keys + ahead[i] + d);
  };
  if constexpr (std::is_same_v<Stored, bf16>)
    for (; d + 2 * W <= dim; d += 2 * W) {
      fetch(d), fetch(d + W);
      dot_keys<M>(keys, at, query, dim, d, total, 0);
      dot_keys<M>(keys, at, query, dim, d, total, 1);
    }
  if constexpr (CODED<Stored>)
    for (; d + 4 * W <= dim; d += 4 * W) {
      for (int i = 0; i < 4; i++) fetch(d + i * W);
      dot_codes<M>(keys, at, query, dim, d, total);
    }
  for (; d < dim; d += W) {
    fetch(d);
    vf k[2][W];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) k[half][i] = widen(keys + at[half * W + i] + d);
      transpose(k[half]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const vf q = splat(query[m * dim + d + i]);
        total[m][0] += k[0][i] * q;
        total[m][1] += k[1][i] * q;
      }
  }
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) store(scores + m * KEYS + half * W, total[m][half]);
}

// out [lane][dim] += scores [lane][key] · values, N vectors of the head at a time.
template <class Stored, int M, int N>
inline void weigh(const Stored* values, const int64_t* at, const int64_t* ahead, int64_t count, const float* scores,
                  int64_t dim, float* out) {
  vf total[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) total[m][n] = load<vf>(out + m * dim + n * W);
  for (int64_t key = 0; key < count; key++) {
    vf v[N];
    __builtin_prefetch(values + ahead[key]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) v[n] = widen(values + at[key] + n * W);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      vf p = splat(scores[m * KEYS + key]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) total[m][n] += p * v[n];
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store(out + m * dim + n * W, total[m][n]);
}

inline vf scaled(vf score, vf scale, vf sink) {
  return score * magnitude(scale) + (vf)((vu)sink & (vu)(scale < 0.0f));
}

// Up to a multiple of W.
inline void scale_scores(const float* scales, int64_t count, float* scores) {
  for (int64_t key = 0; key < count; key += W) store(scores + key, load<vf>(scores + key) * load<vf>(scales + key));
}

// One query, M of whose heads share the key head. Computes what `many_lanes` computes, in the same order.
template <class Stored, int M>
inline void few_lanes(const Attended& t, const int64_t* table, int64_t head, int64_t begin, int64_t end,
                      int64_t position, Scratch& s) {
  const int64_t dim = t.dim;
  // Blocks lie anywhere in the pool, so the processor cannot guess what comes next: a later block is fetched in step
  // with this one.
  Tile<Stored> keys, codes;
  for (int64_t tile = begin; tile < end; tile += KEYS) {
    const int64_t count = std::min<int64_t>(KEYS, end - tile);
    keys.open(t, t.keys, table, head, tile, end, s.keys);
    for (int64_t key = 0; key < count; key += 2 * W)
      dots<Stored, M>(keys.from, keys.at + key, keys.ahead + key, s.query, dim, s.scores + key);
    if constexpr (CODED<Stored>) {
      read_scales(t, t.keys, table, head, tile, end, s.key_scale);
      for (int m = 0; m < M; m++)
        for (int64_t key = 0; key < count; key += W) {
          float* at = s.scores + m * KEYS + key;
          store(at, scaled(load<vf>(at), load<vf>(s.key_scale + key), splat(s.sink[m])));
        }
    }
    const int64_t unseen = t.window ? std::max<int64_t>(0, position - t.window + 1 - tile) : 0;
    float factors[M], totals[M] = {};
    for (int m = 0; m < M; m++) {
      float* scores = s.scores + m * KEYS;
      if (t.softcap != 0)
        for (int64_t key = 0; key < count; key += W)
          store(scores + key, hyperbolic_tangent(load<vf>(scores + key) / t.softcap) * t.softcap);
      for (int64_t key = 0; key < unseen; key++) scores[key] = -HUGE_VALF;
      for (int64_t key = count; key % W; key++) scores[key] = -HUGE_VALF;  // padding of the last vector
      vf top = splat(-HUGE_VALF);
      for (int64_t key = 0; key < count; key += W) top = greater(load<vf>(scores + key), top);
      const float high = std::max(s.high[m], most(top)), base = high == -HUGE_VALF ? 0.0f : high;
      for (int64_t key = 0; key < count; key += W) store(scores + key, exponential(load<vf>(scores + key) - base));
      const float factor = factors[m] = exponential(splat(s.high[m] - base))[0];
      if (factor != 1.0f)
        for (int64_t d = 0; d < dim; d += W) store(s.out + m * dim + d, load<vf>(s.out + m * dim + d) * factor);
      s.high[m] = high;
    }
    for (int64_t key = 0; key < count; key++)
      for (int m = 0; m < M; m++) totals[m] += s.scores[m * KEYS + key];
    for (int m = 0; m < M; m++) s.total[m] = s.total[m] * factors[m] + totals[m];
    if constexpr (CODED<Stored>) {
      codes.open(t, t.values, table, head, tile, end, s.values);
      read_scales(t, t.values, table, head, tile, end, s.value_scale);
      for (int m = 0; m < M; m++) scale_scores(s.value_scale, count, s.scores + m * KEYS);
    }
    const Tile<Stored>& values = CODED<Stored> ? codes : keys;  // plain values lie as their keys do
    const Stored* from = CODED<Stored> ? codes.from : (const Stored*)t.values.data;
    constexpr int N = M <= 3 ? 4 : 2;
    int64_t d = 0;
    for (; d + N * W <= dim; d += N * W)
      weigh<Stored, M, N>(from + d, values.at, values.ahead, count, s.scores, dim, s.out + d);
    for (; d < dim; d += W) weigh<Stored, M, 1>(from + d, values.at, values.ahead, count, s.scores, dim, s.out + d);
  }
}

// `lanes` is a multiple of W; `positions` [lanes] that of each lane's query.
template <class Stored>
inline void many_lanes(const Attended& t, const int64_t* table, int64_t head, int64_t begin, int64_t end, int lanes,
                       const int32_t* positions, Scratch& s) {
  const int64_t dim = t.dim;
  const int64_t first = positions[0], last = *std::max_element(positions, positions + lanes);
  for (int64_t tile = begin; tile < end; tile += KEYS) {
    const int64_t count = std::min<int64_t>(KEYS, end - tile);
    widen_tile<Stored>(t, t.keys, table, head, tile, count, s.keys, s.key);
    widen_tile<Stored>(t, t.values, table, head, tile, count, s.keys, s.value);
    if constexpr (CODED<Stored>) {
      read_scales(t, t.keys, table, head, tile, end, s.key_scale);
      read_scales(t, t.values, table, head, tile, end, s.value_scale);
    }
    product(s.key, dim, 1, s.query, LANES, s.scores, LANES, count, lanes, dim, false);
    const bool edge = tile + count - 1 > first || (t.window && tile <= last - t.window);
    for (int lane = 0; lane < lanes; lane += W) {
      if (tile + KEYS < end) fetch<Stored>(t, table, head, tile + KEYS, end, lane / W, lanes / W);
      const vi position = load<vi>(positions + lane);
      vf high = load<vf>(s.high + lane), before = high;
      for (int64_t key = 0; key < count; key++) {
        float* at = s.scores + key * LANES + lane;
        vf v = load<vf>(at);
        if constexpr (CODED<Stored>) v = scaled(v, splat(s.key_scale[key]), load<vf>(s.sink + lane));
        if (t.softcap != 0) v = hyperbolic_tangent(v / t.softcap) * t.softcap;
        if (edge) {
          const int32_t seen = int32_t(tile + key);
          v = position < seen ? splat(-HUGE_VALF) : v;
          if (t.window) v = position - int32_t(t.window) >= seen ? splat(-HUGE_VALF) : v;
        }
        store(at, v);
        high = greater(v, high);
      }
      // A lane that has seen no key yet: any finite number keeps the differences defined.
      vf base = high == -HUGE_VALF ? vf{} : high;
      vf total = {};
      for (int64_t key = 0; key < count; key++) {
        float* at = s.scores + key * LANES + lane;
        vf p = exponential(load<vf>(at) - base);
        total += p;
        if constexpr (CODED<Stored>) p = p * s.value_scale[key];
        store(at, p);
      }
      vf factor = exponential(before - base);
      store(s.total + lane, load<vf>(s.total + lane) * factor + total);
      store(s.high + lane, high);
      for (int j = 0; j < W; j++)
        if (factor[j] != 1.0f)
          for (int64_t d = 0; d < dim; d += W) {
            float* at = s.out + (lane + j) * dim + d;
            store(at, load<vf>(at) * factor[j]);
          }
    }
    product(s.scores, 1, LANES, s.value, dim, s.out, dim, lanes, dim, count, true);
  }
}

}  // namespace OCTAVO_ISA

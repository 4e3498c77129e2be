// Attention of some lanes over a span of keys, few lanes or many: see attention.h.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "program.h"
#include "simd.h"

namespace OCTAVO_ISA {

using octavo::Attended;
using octavo::Kind;

constexpr int KEYS = 64;    // keys of a tile
constexpr int LANES = 48;   // most lanes of an item
constexpr int FEW = 4;      // up to so many lanes are computed one by one
constexpr int DIM = 256;    // largest head
constexpr int AHEAD = 2;    // blocks: how early memory is asked for what decode will read

// Everything an item needs besides: one of these per thread.
struct Scratch {
  alignas(64) float query[DIM * LANES];   // few: [lane][dim]; many: [dim][lane]
  alignas(64) float key[KEYS * DIM];
  alignas(64) float value[KEYS * DIM];
  alignas(64) float scores[KEYS * LANES];
  alignas(64) float out[LANES * DIM];     // [lane][dim]
  alignas(64) float high[LANES], total[LANES];
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

// Where key `position` of the item lies, as an offset in elements into the keys or values of the layer.
inline int64_t place(const Attended& t, const int64_t* table, int64_t head, int64_t position) {
  const int64_t block = table[position / t.block_size];
  return ((block * t.kv_heads + head) * t.block_size + position % t.block_size) * t.dim;
}

template <class Stored>
inline void widen_tile(const Attended& t, const void* from, const int64_t* table, int64_t head, int64_t begin,
                       int64_t count, float* to) {
  for (int64_t done = 0; done < count;) {
    const int64_t run = std::min(count - done, t.block_size - (begin + done) % t.block_size);
    const Stored* block = (const Stored*)from + place(t, table, head, begin + done);
    for (int64_t i = 0; i < run * t.dim; i += W) store(to + done * t.dim + i, widen(block + i));
    done += run;
  }
}

// Where the keys of a tile lie, as `place` gives it; from `last` on, always that one.
inline void places(const Attended& t, const int64_t* table, int64_t head, int64_t begin, int64_t last, int64_t* at) {
  int64_t key = 0;
  while (key < KEYS && begin + key <= last) {  // a division a block: one a key takes longer than all that is done with it
    const int64_t from = place(t, table, head, begin + key), rest = std::min(KEYS - key, last + 1 - begin - key),
                  run = std::min(rest, t.block_size - (begin + key) % t.block_size);
    for (int64_t i = 0; i < run; i++) at[key++] = from + i * t.dim;
  }
  std::fill(at + key, at + KEYS, key < KEYS ? place(t, table, head, last) : 0);
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

// One query, M of whose heads share the key head. Computes what `many_lanes` computes, in the same order.
template <class Stored, int M>
inline void few_lanes(const Attended& t, const int64_t* table, int64_t head, int64_t begin, int64_t end,
                      int64_t position, Scratch& s) {
  const int64_t dim = t.dim;
  const Stored *keys = (const Stored*)t.keys, *values = (const Stored*)t.values;
  // Blocks lie anywhere in the pool, so the processor cannot guess what comes next: a later block is fetched in step
  // with this one.
  int64_t at[KEYS], ahead[KEYS];
  for (int64_t tile = begin; tile < end; tile += KEYS) {
    const int64_t count = std::min<int64_t>(KEYS, end - tile);
    places(t, table, head, tile, end - 1, at);
    places(t, table, head, tile + AHEAD * t.block_size, end - 1, ahead);
    for (int64_t key = 0; key < count; key += 2 * W)
      dots<Stored, M>(keys, at + key, ahead + key, s.query, dim, s.scores + key);
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
    constexpr int N = M <= 3 ? 4 : 2;
    int64_t d = 0;
    for (; d + N * W <= dim; d += N * W) weigh<Stored, M, N>(values + d, at, ahead, count, s.scores, dim, s.out + d);
    for (; d < dim; d += W) weigh<Stored, M, 1>(values + d, at, ahead, count, s.scores, dim, s.out + d);
  }
}

// Ask for the keys and values of the part'th of `parts` parts of a tile.
template <class Stored>
inline void fetch(const Attended& t, const int64_t* table, int64_t head, int64_t begin, int64_t end, int part,
                  int parts) {
  const int64_t count = std::min<int64_t>(KEYS, end - begin);
  for (int64_t key = begin + count * part / parts; key < begin + count * (part + 1) / parts; key++) {
    const int64_t at = place(t, table, head, key);
    for (int64_t d = 0; d < t.dim; d += 64 / int64_t(sizeof(Stored))) {
      __builtin_prefetch((const Stored*)t.keys + at + d);
      __builtin_prefetch((const Stored*)t.values + at + d);
    }
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
    widen_tile<Stored>(t, t.keys, table, head, tile, count, s.key);
    widen_tile<Stored>(t, t.values, table, head, tile, count, s.value);
    product(s.key, dim, 1, s.query, LANES, s.scores, LANES, count, lanes, dim, false);
    const bool edge = tile + count - 1 > first || (t.window && tile <= last - t.window);
    for (int lane = 0; lane < lanes; lane += W) {
      if (tile + KEYS < end) fetch<Stored>(t, table, head, tile + KEYS, end, lane / W, lanes / W);
      const vi position = load<vi>(positions + lane);
      vf high = load<vf>(s.high + lane), before = high;
      for (int64_t key = 0; key < count; key++) {
        float* at = s.scores + key * LANES + lane;
        vf v = load<vf>(at);
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
        store(at, p);
        total += p;
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

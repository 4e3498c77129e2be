// Causal attention over the paged pool: one pass over the keys with a running softmax, float32 throughout.
//
// Work is cut into items (row, key head, queries, span of keys). An item reads its keys in tiles of KEYS:
//
//   few lanes (decode)      scores [lane][key]: keys fill the vectors, transposed as they are read
//   many lanes (a chunk)    scores [key][lane]: two small matrix products; a key is broadcast, lanes fill the vectors,
//                           so that the softmax over keys needs no step across lanes
//
// A lane is one query of one of the heads that share the key head. Where an item has not all of its row's keys it
// leaves (largest score, sum, weighted values) in a part, and `merge` puts the parts together in the keys' order.
//
// Where rows have their first keys in common (a system prompt, several answers to one question), those are read once
// for all of them, and each row goes on from what that has left.
//
// Every sum runs in the same order and portions on all of these ways: a query's result does not depend on whether it
// came alone, in a chunk, behind a draft or with others that share its beginning.
#pragma once

#include "lanes.h"

namespace OCTAVO_ISA {

using octavo::Common;
using octavo::Item;
using octavo::Merge;
using octavo::Portions;
using octavo::Rows;
using octavo::Slots;

// Where the result of a lane goes, whose item begins with the step's token `token`.
inline float* out_of(const Attended& t, int64_t token, int64_t head, int64_t lane) {
  const int64_t shared = t.shared();
  return t.out + ((token + lane / shared) * t.heads + head * shared + lane % shared) * t.dim;
}

// The query of the step's token `token` and of head `head` becomes lane `lane`.
inline void put_query(const Attended& t, int64_t token, int64_t head, int lane, bool few, Scratch& s) {
  const float* q = t.query + token * t.query_stride + head * t.dim;
  float* row = few ? s.query + lane * t.dim : s.row;
  for (int64_t d = 0; d < t.dim; d += W) store(row + d, load<vf>(q + d) * t.scale);
  if (t.keys.fit) {
    fit_query(t.keys, t.kv_heads, head / t.shared(), row, t.dim);
    rotate_code(row, t.dim);
    const float* sink = sink_of(t.keys, t.kv_heads, head / t.shared(), t.dim);
    vf dot = {};
    for (int64_t d = 0; d < t.dim; d += W) dot += load<vf>(row + d) * load<vf>(sink + d);
    s.sink[lane] = sum(dot);
  }
  if (!few)
    for (int64_t d = 0; d < t.dim; d++) s.query[d * LANES + lane] = row[d];
}

// A lane's values, weighed and divided by the sum of the weights, become its result.
inline void finish(const Attended& t, float* out) {
  if (t.values.bits == 4) rotate_back(out, t.dim);
}

// A part: largest score and sum of each of `count` lanes, then the lanes' values.
inline int64_t part_size(int64_t lanes, int64_t dim) { return lanes * (dim + 2); }

inline void save(const Scratch& s, int lane, int64_t count, int64_t dim, float* part) {
  std::memcpy(part, s.high + lane, count * sizeof(float));
  std::memcpy(part + count, s.total + lane, count * sizeof(float));
  std::memcpy(part + 2 * count, s.out + lane * dim, count * dim * sizeof(float));
}

inline void restore(Scratch& s, int64_t count, int64_t dim, const float* part) {
  std::memcpy(s.high, part, count * sizeof(float));
  std::memcpy(s.total, part + count, count * sizeof(float));
  std::memcpy(s.out, part + 2 * count, count * dim * sizeof(float));
}

inline void clear(Scratch& s, int lanes, int64_t dim) {
  std::fill_n(s.high, lanes, -HUGE_VALF);
  std::fill_n(s.total, lanes, 0.0f);
  std::memset(s.out, 0, lanes * dim * sizeof(float));
}

template <class Stored>
inline void attend(const Attended& t, const Rows& rows, const Item& item, Scratch& s) {
  const int64_t shared = t.shared(), dim = t.dim, token = rows.row_starts[item.row] + item.first;
  const int used = int(item.count * shared);
  const bool few = item.count == 1 && shared <= FEW;
  const int lanes = few ? used : (used + W - 1) / W * W;
  int32_t positions[LANES];
  for (int lane = 0; lane < lanes; lane++) {
    const int real = std::min(lane, used - 1), query = real / int(shared);
    positions[lane] = int32_t(rows.starts[item.row] + item.first + query);
    put_query(t, token + query, item.head * shared + real % shared, lane, few, s);
  }
  clear(s, lanes, dim);
  if (item.state >= 0) restore(s, used, dim, t.parts + item.state);
  const int64_t* table = rows.table(t.group, item.row);
  if (!few)
    many_lanes<Stored>(t, table, item.head, item.begin, item.end, lanes, positions, s);
  else
    switch (lanes) {
      case 1: few_lanes<Stored, 1>(t, table, item.head, item.begin, item.end, positions[0], s); break;
      case 2: few_lanes<Stored, 2>(t, table, item.head, item.begin, item.end, positions[0], s); break;
      case 3: few_lanes<Stored, 3>(t, table, item.head, item.begin, item.end, positions[0], s); break;
      default: few_lanes<Stored, 4>(t, table, item.head, item.begin, item.end, positions[0], s); break;
    }
  if (item.part >= 0) return save(s, 0, used, dim, t.parts + item.part);
  for (int lane = 0; lane < used; lane++) {
    float* out = out_of(t, token, item.head, lane);
    const float inverse = 1.0f / s.total[lane];
    for (int64_t d = 0; d < dim; d += W) store(out + d, load<vf>(s.out + lane * dim + d) * inverse);
    finish(t, out);
  }
}

// Queries of several rows over keys that they have in common, and that all of them see: read once for all.
template <class Stored>
inline void attend(const Attended& t, const Rows& rows, const Portions& cut, const Common& c, Scratch& s) {
  const int64_t shared = t.shared(), dim = t.dim;
  const int32_t* members = cut.members.data() + c.first;
  int32_t positions[LANES];
  int lanes = 0;
  const auto put = [&](int32_t row, int64_t lane) {
    put_query(t, rows.row_starts[row] + lane / shared, c.head * shared + lane % shared, lanes, false, s);
    positions[lanes++] = int32_t(c.end);
  };
  for (int m = 0; m < c.count; m++)
    for (int64_t lane = 0; lane < rows.counts[members[m]] * shared; lane++) put(members[m], lane);
  while (lanes % W) put(members[0], 0);
  clear(s, lanes, dim);
  many_lanes<Stored>(t, rows.table(t.group, members[0]), c.head, c.begin, c.end, lanes, positions, s);
  int lane = 0;
  for (int m = 0; m < c.count; m++) {
    const int64_t count = rows.counts[members[m]] * shared;
    save(s, lane, count, dim, t.parts + cut.slots[members[m]].slot(c.head, c.begin, part_size(count, dim)));
    lane += int(count);
  }
}

inline void merge(const Attended& t, const Rows& rows, const Merge& m) {
  const int64_t dim = t.dim, token = rows.row_starts[m.row] + m.first;
  const int64_t lanes = m.count * t.shared(), size = part_size(lanes, dim);
  const float* parts = t.parts + m.part;
  for (int64_t lane = 0; lane < lanes; lane++) {
    float* out = out_of(t, token, m.head, lane);
    float high = -HUGE_VALF, total = 0;
    for (int p = 0; p < m.parts; p++) high = std::max(high, parts[p * size + lane]);
    for (int64_t d = 0; d < dim; d += W) store(out + d, vf{});
    for (int p = 0; p < m.parts; p++) {
      const float* part = parts + p * size;
      // A part without a key that the lane sees has the score -inf and weighs nothing.
      const float factor = exponential(splat(part[lane] - high))[0];
      total += part[lanes + lane] * factor;
      for (int64_t d = 0; d < dim; d += W)
        store(out + d, load<vf>(out + d) + load<vf>(part + 2 * lanes + lane * dim + d) * factor);
    }
    const float inverse = 1.0f / total;
    for (int64_t d = 0; d < dim; d += W) store(out + d, load<vf>(out + d) * inverse);
    finish(t, out);
  }
}

}  // namespace OCTAVO_ISA

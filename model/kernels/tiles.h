// Where the keys and values of an item lie, and how they are read: in tiles of KEYS, from blocks that lie anywhere.
#pragma once

#include "codes.h"

namespace OCTAVO_ISA {

using octavo::Attended;
using octavo::Kind;

constexpr int KEYS = 64;    // keys of a tile
constexpr int AHEAD = 2;    // blocks: how early memory is asked for what decode will read

template <class Stored>
constexpr bool CODED = std::is_same_v<Stored, int8_t>;

// The tile of the head in the block of key `position` of the item.
inline int64_t tile_of(const Attended& t, const int64_t* table, int64_t head, int64_t position) {
  return table[position / t.block_size] * t.kv_heads + head;
}

// Where key `position` of the item lies, as an offset in elements into the keys or values of the layer.
inline int64_t place(const Attended& t, const Plane& p, const int64_t* table, int64_t head, int64_t position) {
  return tile_of(t, table, head, position) * p.tile + position % t.block_size * p.row;
}

// Calls work(key of the tile, position, keys) for the keys of a tile, block by block.
template <class Work>
inline void each_block(const Attended& t, int64_t begin, int64_t count, Work work) {
  for (int64_t key = 0, run; key < count; key += run) {
    run = std::min(count - key, t.block_size - (begin + key) % t.block_size);
    work(key, begin + key, run);
  }
}

// A tile's keys, or values, as floats [key][dim], for many lanes. Codes are left to their scales.
template <class Stored>
inline void widen_tile(const Attended& t, const Plane& p, const int64_t* table, int64_t head, int64_t begin,
                       int64_t count, int8_t* unpacked, float* to) {
  each_block(t, begin, count, [&](int64_t key, int64_t position, int64_t run) {
    const Stored* from = (const Stored*)p.data + place(t, p, table, head, position);
    if (CODED<Stored> && p.bits == 4) {
      for (int64_t i = 0; i < run; i++) unpack((const uint8_t*)from + i * p.row, t.dim, unpacked + i * t.dim);
      from = (const Stored*)unpacked;
    }
    for (int64_t i = 0; i < run * t.dim; i += W) store(to + key * t.dim + i, widen(from + i));
  });
}

// Where the keys of a tile lie, as `place` gives it; from `last` on, always that one.
inline void places(const Attended& t, const Plane& p, const int64_t* table, int64_t head, int64_t begin, int64_t last,
                   int64_t* at) {
  const int64_t count = std::clamp<int64_t>(last + 1 - begin, 0, KEYS);
  each_block(t, begin, count, [&](int64_t key, int64_t position, int64_t run) {
    // A division a block: one a key takes longer than all that is done with it.
    const int64_t from = place(t, p, table, head, position);
    for (int64_t i = 0; i < run; i++) at[key + i] = from + i * p.row;
  });
  std::fill(at + count, at + KEYS, count < KEYS ? place(t, p, table, head, last) : 0);
}

// Behind a block, the one that decode reads AHEAD blocks later; the last one of the item stays.
inline int64_t later(const Attended& t, int64_t position, int64_t end) {
  return std::min(position + AHEAD * t.block_size, end - 1);
}

// The scales of a tile's vectors, up to a multiple of W; and the memory of later ones is asked for.
inline void read_scales(const Attended& t, const Plane& p, const int64_t* table, int64_t head, int64_t begin,
                        int64_t end, float* to) {
  each_block(t, begin, std::min<int64_t>(KEYS, end - begin), [&](int64_t key, int64_t position, int64_t run) {
    const auto scales = [&](int64_t position) { return scales_of(p, tile_of(t, table, head, position), t.block_size); };
    __builtin_prefetch(scales(later(t, position, end)));
    const f16* from = scales(position) + position % t.block_size;
    for (int64_t i = 0; i < run; i += W) store(to + key + i, widen(from + i));
  });
}

// 4-bit codes of a tile as 8-bit ones, one vector behind the other.
inline void unpack_tile(const Attended& t, const Plane& p, const int64_t* table, int64_t head, int64_t begin,
                        int64_t end, int8_t* to) {
  each_block(t, begin, std::min<int64_t>(KEYS, end - begin), [&](int64_t key, int64_t position, int64_t run) {
    const uint8_t* from = (const uint8_t*)p.data + place(t, p, table, head, position);
    const char* ahead = p.data + place(t, p, table, head, later(t, position, end) / t.block_size * t.block_size);
    for (int64_t i = 0; i < run; i++) {
      __builtin_prefetch(ahead + i * p.row);
      unpack(from + i * p.row, t.dim, to + (key + i) * t.dim);
    }
  });
}

// A tile's keys, or values, for few lanes: element d of vector i is from[at[i] + d], and `ahead` what is asked for.
template <class Stored>
struct Tile {
  const Stored* from;
  int64_t at[KEYS], ahead[KEYS];

  void open(const Attended& t, const Plane& p, const int64_t* table, int64_t head, int64_t begin, int64_t end,
            int8_t* unpacked) {
    if (CODED<Stored> && p.bits == 4) {
      unpack_tile(t, p, table, head, begin, end, unpacked);
      from = (const Stored*)unpacked;
      for (int64_t i = 0; i < KEYS; i++) at[i] = ahead[i] = i * t.dim;
      return;
    }
    from = (const Stored*)p.data;
    places(t, p, table, head, begin, end - 1, at);
    places(t, p, table, head, begin + AHEAD * t.block_size, end - 1, ahead);
  }
};

// Ask for the keys and values of the part'th of `parts` parts of a tile.
template <class Stored>
inline void fetch(const Attended& t, const int64_t* table, int64_t head, int64_t begin, int64_t end, int part,
                  int parts) {
  const int64_t count = std::min<int64_t>(KEYS, end - begin);
  for (int64_t key = begin + count * part / parts; key < begin + count * (part + 1) / parts; key++)
    for (const Plane* p : {&t.keys, &t.values}) {
      const Stored* at = (const Stored*)p->data + place(t, *p, table, head, key);
      for (int64_t d = 0; d < p->row; d += 64 / int64_t(sizeof(Stored))) __builtin_prefetch(at + d);
      if (CODED<Stored>) __builtin_prefetch(scales_of(*p, tile_of(t, table, head, key), t.block_size));
    }
}

}  // namespace OCTAVO_ISA

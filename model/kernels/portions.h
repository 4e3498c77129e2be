// How a step's attention is cut into items, once for all layers of one window.
//
//   spans of keys          0        1,024      2,048
//   row a   ████████████████|████░░░░░                   ████  in common with b: read once for both (Common)
//   row b   ████████████████|████▒▒▒▒▒▒▒▒▒▒|▒▒▒          ░ ▒   its own: an Item goes on where the common part ends
//
// Where a row is cut depends on nothing but the row, and what it has in common is cut at tiles of keys: its sums are
// the same with others and without.
#pragma once

#include <numeric>

#include "attention.h"

namespace OCTAVO_ISA {

// Keys that rows [first, last) of `order` have in common in all these groups, in whole tiles, all before any of their
// queries.
inline int64_t common_keys(const Rows& rows, const std::vector<int64_t>& groups, const int32_t* first,
                           const int32_t* last, int64_t block_size) {
  int64_t keys = rows.starts[*first];
  for (const int32_t* row = first + 1; row < last; row++) {
    keys = std::min(keys, rows.starts[*row]);
    for (int64_t group : groups) {
      const int64_t *table = rows.table(group, *first), *other = rows.table(group, *row);
      keys = std::min(keys, (std::mismatch(table, table + keys / block_size, other).first - table) * block_size);
    }
  }
  return keys / KEYS * KEYS;
}

// Find rows that begin in the same blocks: their members and commons, and how many keys of each row are in those.
inline void find_common(const Rows& rows, const octavo::Geometry& g, const std::vector<int64_t>& groups,
                        int64_t block_size, Portions& to) {
  const int64_t shared = g.heads / g.kv_heads, block = KEYS / block_size - 1;  // the last one of the first tile
  const auto id = [&](int32_t row) { return rows.table(groups[0], row)[block]; };
  std::vector<int32_t>& order = to.order;
  order.clear();
  for (int32_t row = 0; row < rows.rows; row++)
    if (rows.starts[row] >= KEYS && rows.counts[row] * shared <= LANES) order.push_back(row);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return id(a) < id(b); });
  for (auto first = order.begin(), last = first; first != order.end(); first = last) {
    last = std::find_if(first, order.end(), [&](int32_t row) { return id(row) != id(*first); });
    const int64_t keys = last - first > 1 ? common_keys(rows, groups, &*first, &*first + (last - first), block_size) : 0;
    if (keys == 0) continue;
    for (auto row = first; row != last;) {
      const int32_t member = int32_t(to.members.size());
      int64_t lanes = 0;
      for (; row != last && (lanes += rows.counts[*row] * shared) <= LANES; row++) {
        to.members.push_back(*row);
        to.common[*row] = keys;
      }
      for (int32_t head = 0; head < g.kv_heads; head++)
        for (int64_t begin = 0; begin < keys; begin += octavo::SPAN)
          to.commons.push_back({head, member, int32_t(to.members.size()) - member, begin,
                                std::min(keys, begin + octavo::SPAN)});
    }
  }
}

// Returns the floats of all parts. An item's keys lie within one span of its row.
inline int64_t cut(const Rows& rows, const octavo::Geometry& g, int64_t window, const std::vector<int64_t>& groups,
                   int64_t block_size, Portions& to) {
  constexpr int64_t SPAN = octavo::SPAN;
  const int64_t shared = g.heads / g.kv_heads, most = LANES / shared;
  int64_t floats = 0;
  to.items.clear(), to.later.clear(), to.merges.clear(), to.members.clear(), to.commons.clear();
  to.common.assign(rows.rows, 0);
  to.slots.assign(rows.rows, {});
  if (!window && rows.rows > 1 && KEYS % block_size == 0) find_common(rows, g, groups, block_size, to);
  for (int32_t row = 0; row < rows.rows; row++)
    for (int64_t first = 0; first < rows.counts[row]; first += most) {
      const int64_t count = std::min(most, rows.counts[row] - first), start = rows.starts[row] + first;
      // Whole tiles, so that a query's keys are summed in the same portions whatever queries are beside it.
      const int64_t begin = window ? std::max<int64_t>(0, start - window + 1) / KEYS * KEYS : 0, end = start + count;
      const int64_t spans = (end - 1) / SPAN - begin / SPAN + 1, size = part_size(count * shared, g.dim);
      const int64_t common = to.common[row];
      const Slots slots = to.slots[row] = {floats, spans};
      if (spans > 1 || common) floats += g.kv_heads * spans * size;
      for (int32_t head = 0; head < g.kv_heads; head++) {
        const auto slot = [&](int64_t key) { return slots.slot(head, key - begin / SPAN * SPAN, size); };
        if (spans > 1) to.merges.push_back({row, head, int32_t(first), int32_t(count), slot(begin), int32_t(spans)});
        for (int64_t s = std::max(begin, common) / SPAN; s <= (end - 1) / SPAN; s++) {
          const int64_t from = std::max({begin, common, s * SPAN}), until = std::min(end, (s + 1) * SPAN);
          const bool goes_on = common > s * SPAN;
          (goes_on ? to.later : to.items)
              .push_back({row, head, int32_t(first), int32_t(count), from, until, spans > 1 ? slot(from) : -1,
                          goes_on ? slot(from) : -1});
        }
      }
    }
  return floats;
}

}  // namespace OCTAVO_ISA

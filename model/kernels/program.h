// What the kernels compute on: plain records without torch and without an instruction set, filled by library.cpp.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <vector>

namespace octavo {

enum class Kind : int { f32, f16, bf16, int8, int4 };
enum class Activation : int { silu, gelu_tanh };

// By how many rows a step has, up to so many: how many panels wide the register tiles are, which are as many rows fewer
// high. Until measure.h has found out, what holds on most processors: wide for few rows, to keep enough additions under way.
constexpr int STEPS[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
constexpr int WIDTHS[] = {1, 2, 4};

struct Tiles {
  uint8_t width[std::size(STEPS)] = {4, 2, 2, 1, 1, 1, 1, 1, 1, 1};
  int of(int64_t rows) const {
    size_t i = 0;
    while (i + 1 < std::size(STEPS) && STEPS[i] < rows) i++;
    return width[i];
  }
};

// A weight [outputs, inputs], repacked in panels of 2 W outputs; see panels.h for how a panel lies in memory.
struct Matrix {
  Kind kind;
  bool gated;        // the two vectors of a panel are W gates and the W ups that belong to them
  int64_t outputs;   // of a gated one: after gating
  int64_t inputs;
  int64_t panels;
  void* data;
  float* scales;         // [panels * 2 W], int8 only: weight = scale * integer
  float* bias;           // [panels * 2 W] or null
  Tiles tiles;
};

// Rows of activations in the form that a matrix multiplies.
struct Operand {
  const float* rows;   // [rows, stride]
  int64_t stride;
  void* encoded;       // [rows, encoded_bytes(matrix)], where the kind needs another form than float
  float* scales;       // [rows], int8 and int4 only
};

// The largest of a row's outputs so far, and the first that is so; NaN where one is.
struct Peak {
  float value = -__builtin_inff();
  int64_t output = 0;
  bool operator<(const Peak& other) const {
    return value < other.value || (value == other.value && output > other.output) || other.value != other.value;
  }
};

struct Norm {
  const float* weight = nullptr;  // null: there is no such norm
};

struct Layer {
  Matrix qkv, output, gate_up, down;
  Norm before_attention, after_attention, before_mlp, after_mlp;
  Norm qk_heads;  // [heads + kv_heads, dim]
  Norm q_full, k_full;
  int64_t window;  // 0: sees everything
  int64_t rope;    // which rotary table; -1: none
};

struct Geometry {
  int64_t hidden, intermediate, heads, kv_heads, dim;
  float eps, attention_scale, attention_softcap /* 0: none */, residual_multiplier;
  Activation activation;
};

// Keys or values of a layer: tiles [blocks, kv_heads], in each a vector for every slot of the block. See codes.h.
struct Plane {
  char* data;
  int64_t tile, row;  // from one tile, or vector, to the next: in numbers, or in bytes where there are codes
  int bits;           // of a code, 8 or 4; 0: plain numbers
  const float* fit;   // of keys as codes: see kvpool/fit.py, [4, kv_heads, dim]; null: none
};

struct Pool {
  Kind kind;  // int8: codes
  int64_t block_size;
  Plane keys, values;     // of the first slot and layer
  int64_t slot_bytes;     // from one slot's to the next one's
  int64_t layer_fit;      // of Plane::fit, from one layer's to the next one's, in floats
  const int64_t* places;  // [layers, 2]: slot and group; see kvpool/groups.py
  int64_t group(int64_t number) const { return places[2 * number + 1]; }
  Plane layer(Plane first, int64_t number) const {
    first.data += places[2 * number] * slot_bytes;
    if (first.fit) first.fit += number * layer_fit;
    return first;
  }
};

// The rows of a step; names and meaning as in model/inputs.py.
struct Rows {
  int64_t groups, tokens, rows;
  const int64_t* blocks;                              // [groups, tokens]
  const int64_t* offsets;                             // [tokens]
  const int64_t *row_starts, *starts, *counts;        // [rows]
  const int64_t* tables;                              // [groups, rows, table_stride]
  int64_t table_stride;
  const int64_t* table(int64_t group, int64_t row) const { return tables + (group * rows + row) * table_stride; }
};

// Part of an attention: queries of one row that share a key head, over a span of its keys.
struct Item {
  int32_t row, head;
  int32_t first, count;   // queries, within the row
  int64_t begin, end;     // keys
  int64_t part;           // where its unfinished result goes, in floats; -1: it has all the keys and writes the result
  int64_t state;          // where the keys before `begin` have left theirs; -1: it begins anew
};

constexpr int64_t SPAN = 1024;  // keys of an item at most: it ends where a multiple of them does

// Where the parts of a row's heads and spans lie.
struct Slots {
  int64_t part;    // of the first head and span, in floats
  int64_t spans;
  int64_t slot(int64_t head, int64_t key, int64_t size) const { return part + (head * spans + key / SPAN) * size; }
};

// Queries of several rows that share a key head, over a span of the keys that the rows have in common.
struct Common {
  int32_t head;
  int32_t first, count;   // of `Portions::members`
  int64_t begin, end;     // keys
};

// The parts of one group of queries, to be put together.
struct Merge {
  int32_t row, head, first, count;
  int64_t part;   // the first of them
  int32_t parts;
};

// A step's attention in pieces. What is in `later` goes on from commons, all else waits for nothing.
struct Portions {
  std::vector<Common> commons;
  std::vector<Item> items, later;
  std::vector<Merge> merges;    // once all items are done
  std::vector<int32_t> members; // rows
  std::vector<int64_t> common;  // [rows] keys that are left to commons
  std::vector<Slots> slots;     // [rows]
  std::vector<int32_t> order;   // of rows, by where they begin
};

struct Rotary {
  const float *cos, *sin;  // [positions, half]
  const int64_t* places;   // [tokens]: their rows of the table
  int64_t half;
};

// All threads of a region meet here. They spin, because a phase lasts microseconds; a thread that shares its core with
// another process gives way after a while.
class Barrier {
 public:
  void wait(int threads) {
    if (threads == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) pause(spins);
  }

 private:
  static void pause(int spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins > 1 << 8) sched_yield();
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

constexpr int COUNTED = 5;  // phases of a layer whose work threads take from a counter: four matrices, attention

// Buffers of a step, sized for the largest one, and what its threads share.
struct Workspace {
  float *normed, *qkv, *attended, *middle, *added;  // [tokens, their width]
  void* encoded;
  float* scales;                                    // [tokens]
  float* parts;
  const Portions* cuts[2];                               // of layers without a window, and with
  std::atomic<int64_t>* counters;                   // [layers * COUNTED], zero at the start
  Barrier* barrier;
};

// What a thread does within the layers; the names are in model/fused.py. `wait`: until the slowest thread is there.
enum class Phase { norms, qkv, heads, attention, output, gate_up, down, wait, count };

// Nanoseconds of one thread's phases, where somebody wants to know.
struct alignas(64) Laps {
  int64_t spent[int(Phase::count)] = {};
  int64_t since = 0;
};

struct Thread {
  int number, count;
  void* scratch;
  Laps* laps = nullptr;

  // What was done since the last mark was this phase.
  void mark(Phase phase) const {
    if (!laps) return;
    const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
    if (phase != Phase::count) laps->spent[int(phase)] += now - laps->since;
    laps->since = now;
  }
};

struct Decode {
  const Geometry& geometry;
  const Layer* layers;
  int64_t num_layers;
  const Pool& pool;
  const Rows& rows;
  const Rotary* rotaries;
  float* x;  // [tokens, hidden], the residual stream
  Norm last; // of the stream, once all layers have added to it
  const Workspace& workspace;
};

// Attention alone, over one layer of a pool.
struct Attended {
  const float* query;  // [tokens, query_stride], head h at h * dim
  int64_t query_stride;
  float* out;          // [tokens, heads * dim]
  Plane keys, values;
  int64_t block_size, heads, kv_heads, dim, window, group;
  float scale, softcap;
  float* parts;
  int64_t shared() const { return heads / kv_heads; }
};

// What one instruction set offers. Everything with a Thread is called by all threads of a region.
struct Kernels {
  int64_t largest_head, most_shared, head_multiple;  // what attention can do
  int64_t scratch_bytes;                             // per thread
  int64_t panel;                                     // outputs of a panel
  int64_t (*panel_count)(bool gated, int64_t outputs);
  int64_t (*panel_bytes)(Kind kind, int64_t inputs);
  int64_t (*encoded_bytes)(Kind kind, int64_t inputs);
  int64_t (*source_row)(const Matrix& m, int64_t panel, int lane);
  void (*pack_panel)(const Matrix& m, int64_t panel, const float* rows, int64_t stride);
  void (*encode)(const Matrix& m, const Operand& x, int64_t row);
  // y [rows, outputs]; of a gated matrix [rows, 2 outputs], gates before ups. Or, where `peaks` is not null, [rows] of
  // those outputs that this thread computes, and none is written.
  void (*multiply)(const Matrix& m, const Operand& x, int64_t rows, float* y, Peak* peaks, std::atomic<int64_t>& next);
  // `groups`: those whose layers have this window.
  int64_t (*cut)(const Rows& rows, const Geometry& g, int64_t window, const std::vector<int64_t>& groups,
                 int64_t block_size, Portions& to);
  void (*attend)(const Attended& a, Kind kind, const Rows& rows, const Portions& cut, std::atomic<int64_t>& counter,
                 Barrier& barrier, const Thread& t);
  void (*decode)(const Decode& d, const Thread& t);
};

}  // namespace octavo

// One step of the decoder family, all layers, in one parallel region: every thread runs `decode`, in phases that end at
// a barrier. Arrangement and arithmetic are those of model/decoder.py, which is the oracle.
//
//   rows     norm, and what the next matrix wants as its operand     threads take every n-th row
//   panels   matrix product, its epilogue in the same pass           threads take the next few from a counter
//   items    attention                                              threads take the next item from a counter
#pragma once

#include "portions.h"
#include "gemm.h"

namespace OCTAVO_ISA {

using octavo::Activation;
using octavo::Geometry;
using octavo::Layer;
using octavo::Norm;
using octavo::Phase;
using octavo::Thread;
using octavo::Workspace;

inline float inverse_rms(const float* x, int64_t size, float eps) {
  vf squares = {};
  int64_t i = 0;
  for (; i + W <= size; i += W) squares += load<vf>(x + i) * load<vf>(x + i);
  float total = sum(squares);
  for (; i < size; i++) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / float(size) + eps);
}

// to = x / rms(x) · weight. `to` may be x.
inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* to) {
  const float factor = inverse_rms(x, size, eps);
  int64_t i = 0;
  for (; i + W <= size; i += W) store(to + i, load<vf>(x + i) * factor * load<vf>(weight + i));
  for (; i < size; i++) to[i] = x[i] * factor * weight[i];
}

inline void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  float* second = head + half;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    vf a = load<vf>(head + i), b = load<vf>(second + i), c = load<vf>(cos + i), s = load<vf>(sin + i);
    store(head + i, a * c - b * s);
    store(second + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = head[i], b = second[i];
    head[i] = a * cos[i] - b * sin[i], second[i] = b * cos[i] + a * sin[i];
  }
}

template <class Stored>
inline void write_head(const Plane& p, int64_t tile, int64_t slot, const float* from, int64_t dim) {
  Stored* to = (Stored*)p.data + tile * p.tile + slot * p.row;
  for (int64_t d = 0; d < dim; d += W) narrow(to + d, load<vf>(from + d));
}

// A head's key or value, to a slot of a block; codes may leave it rotated.
inline void write_head(const octavo::Pool& pool, const Plane& p, int64_t block, int64_t kv_heads, int64_t head,
                       int64_t slot, float* from, int64_t dim, bool key) {
  const int64_t tile = block * kv_heads + head;
  switch (pool.kind) {
    case Kind::f32: return write_head<float>(p, tile, slot, from, dim);
    case Kind::f16: return write_head<f16>(p, tile, slot, from, dim);
    case Kind::bf16: return write_head<bf16>(p, tile, slot, from, dim);
    default: return write_codes(p, block, kv_heads, head, pool.block_size, slot, from, dim, key);
  }
}

template <class Stored>
inline void attend_all(const Attended& a, const Rows& rows, const Portions& cut, std::atomic<int64_t>& counter,
                       octavo::Barrier& barrier, const Thread& t) {
  Scratch& scratch = *(Scratch*)t.scratch;
  const auto meet = [&] {
    t.mark(Phase::attention);
    barrier.wait(t.count);
    t.mark(Phase::wait);
  };
  const int64_t commons = int64_t(cut.commons.size()), ready = commons + int64_t(cut.items.size()),
                all = ready + int64_t(cut.later.size());
  int64_t i = counter.fetch_add(1, std::memory_order_relaxed);
  for (; i < ready; i = counter.fetch_add(1, std::memory_order_relaxed))
    if (i < commons) attend<Stored>(a, rows, cut, cut.commons[i], scratch);
    else attend<Stored>(a, rows, cut.items[i - commons], scratch);
  if (ready < all) meet();
  for (; i < all; i = counter.fetch_add(1, std::memory_order_relaxed))
    attend<Stored>(a, rows, cut.later[i - ready], scratch);
  meet();
  if (cut.merges.empty()) return;
  for (size_t m = t.number; m < cut.merges.size(); m += t.count) merge(a, rows, cut.merges[m]);
  meet();
}

inline void attend_all(const Attended& a, Kind kind, const Rows& rows, const Portions& cut, std::atomic<int64_t>& counter,
                       octavo::Barrier& barrier, const Thread& t) {
  switch (kind) {
    case Kind::f32: return attend_all<float>(a, rows, cut, counter, barrier, t);
    case Kind::f16: return attend_all<f16>(a, rows, cut, counter, barrier, t);
    case Kind::bf16: return attend_all<bf16>(a, rows, cut, counter, barrier, t);
    default: return attend_all<int8_t>(a, rows, cut, counter, barrier, t);
  }
}

inline void store_lanes(const Matrix& m, float* row, int64_t panel, const float* values) {
  const int64_t lanes = std::min<int64_t>(PANEL, m.outputs - panel * PANEL);
  std::memcpy(row + panel * PANEL, values, lanes * sizeof(float));
}

// Panels that no thread has taken yet, a tile's width at a time: who is slow for a moment holds the others up for
// microseconds. Two threads never write to one line of memory.
template <class Finish>
inline void multiply_next(const Matrix& m, const Operand& x, int64_t rows, std::atomic<int64_t>& next, Finish finish) {
  const int64_t portion = std::max<int64_t>(m.tiles.of(rows), m.gated ? 16 / W : 1);
  for (int64_t first; (first = next.fetch_add(portion, std::memory_order_relaxed)) < m.panels;)
    multiply_panels(m, x, rows, first, std::min(first + portion, m.panels), finish);
}

// One thread's way through the step.
struct Step : octavo::Decode {
  const Geometry& g = geometry;
  const Workspace& w = workspace;
  mutable std::atomic<int64_t>* counter = workspace.counters;

  // What hands out the work of the phase that begins: all threads pass the same phases.
  std::atomic<int64_t>& next() const { return *counter++; }

  // The end of a phase: all threads have done their part of it.
  void meet(const Thread& t, Phase phase) const {
    t.mark(phase);
    w.barrier->wait(t.count);
    t.mark(Phase::wait);
  }

  Operand operand(const float* from, int64_t stride) const { return {from, stride, w.encoded, w.scales}; }

  // What `m` multiplies: x, normed where there is a norm. Threads take every n-th row.
  Operand prepare(const Thread& t, const Norm& norm, const Matrix& m) const {
    const Operand to = operand(norm.weight ? w.normed : x, g.hidden);
    for (int64_t row = t.number; row < rows.tokens; row += t.count) {
      if (norm.weight) rms_norm(x + row * g.hidden, norm.weight, g.hidden, g.eps, w.normed + row * g.hidden);
      encode(m, to, row);
    }
    meet(t, Phase::norms);
    return to;
  }

  Operand prepare(const Thread& t, const float* from, const Matrix& m) const {
    const Operand to = operand(from, m.inputs);
    if (!encoded_bytes(m.kind, m.inputs)) return to;
    for (int64_t row = t.number; row < rows.tokens; row += t.count) encode(m, to, row);
    meet(t, Phase::norms);
    return to;
  }

  template <class Finish>
  void multiply(const Thread& t, Phase phase, const Matrix& m, const Operand& from, Finish finish) const {
    multiply_next(m, from, rows.tokens, next(), finish);
    meet(t, phase);
  }

  // x += multiplier · norm(product), the norm where there is one.
  void add(const Thread& t, Phase phase, const Matrix& m, const Operand& from, const Norm& norm) const {
    const float multiplier = g.residual_multiplier;
    if (!norm.weight) {
      multiply(t, phase, m, from, [&](int64_t row, int64_t panel, const float* values) {
        const int64_t lanes = std::min<int64_t>(PANEL, m.outputs - panel * PANEL);
        float* to = x + row * g.hidden + panel * PANEL;
        for (int64_t j = 0; j < lanes; j++) to[j] += values[j] * multiplier;
      });
      return;
    }
    multiply(t, phase, m, from, [&](int64_t row, int64_t panel, const float* values) {
      store_lanes(m, w.added + row * g.hidden, panel, values);
    });
    for (int64_t row = t.number; row < rows.tokens; row += t.count) {
      float* added = w.added + row * g.hidden;
      rms_norm(added, norm.weight, g.hidden, g.eps, added);
      for (int64_t i = 0; i < g.hidden; i++) x[row * g.hidden + i] += added[i] * multiplier;
    }
    meet(t, Phase::norms);
  }

  // Norms and rotation of queries and keys in place; keys and values to the pool.
  void heads(const Thread& t, const Layer& layer, int64_t number) const {
    const int64_t q = g.heads * g.dim, kv = g.kv_heads * g.dim, width = q + 2 * kv;
    for (int64_t row = t.number; row < rows.tokens; row += t.count) {
      float* qkv = w.qkv + row * width;
      if (layer.q_full.weight) {
        rms_norm(qkv, layer.q_full.weight, q, g.eps, qkv);
        rms_norm(qkv + q, layer.k_full.weight, kv, g.eps, qkv + q);
      }
      for (int64_t head = 0; head < g.heads + g.kv_heads; head++) {
        float* values = qkv + head * g.dim;
        if (layer.qk_heads.weight)
          rms_norm(values, layer.qk_heads.weight + head * g.dim, g.dim, g.eps, values);
        if (layer.rope >= 0) {
          const octavo::Rotary& r = rotaries[layer.rope];
          rotate(values, r.cos + r.places[row] * r.half, r.sin + r.places[row] * r.half, r.half);
        }
      }
      for (int64_t head = 0; head < g.kv_heads; head++) {
        const int64_t block = rows.blocks[pool.group(number) * rows.tokens + row], slot = rows.offsets[row];
        float* key = qkv + q + head * g.dim;
        write_head(pool, pool.layer(pool.keys, number), block, g.kv_heads, head, slot, key, g.dim, true);
        write_head(pool, pool.layer(pool.values, number), block, g.kv_heads, head, slot, key + kv, g.dim, false);
      }
    }
    meet(t, Phase::heads);
  }

  void attention(const Thread& t, const Layer& layer, int64_t number) const {
    const int64_t width = (g.heads + 2 * g.kv_heads) * g.dim;
    const Attended attended{w.qkv, width, w.attended, pool.layer(pool.keys, number), pool.layer(pool.values, number),
                            pool.block_size, g.heads, g.kv_heads, g.dim, layer.window, pool.group(number),
                            g.attention_scale, g.attention_softcap, w.parts};
    attend_all(attended, pool.kind, rows, *w.cuts[layer.window != 0], next(), *w.barrier, t);
  }

  void gate(const Thread& t, const Matrix& m, const Operand& from) const {
    multiply(t, Phase::gate_up, m, from, [&](int64_t row, int64_t panel, const float* values) {
      const vf gate = load<vf>(values), up = load<vf>(values + W);
      const vf result = (g.activation == Activation::silu ? silu(gate) : gelu_tanh(gate)) * up;
      const int64_t lanes = std::min<int64_t>(W, m.outputs - panel * W);
      std::memcpy(w.middle + row * g.intermediate + panel * W, &result, lanes * sizeof(float));
    });
  }

  void run(const Thread& t) const {
    t.mark(Phase::count);
    for (int64_t number = 0; number < num_layers; number++) {
      const Layer& layer = layers[number];
      const int64_t width = (g.heads + 2 * g.kv_heads) * g.dim;
      multiply(t, Phase::qkv, layer.qkv, prepare(t, layer.before_attention, layer.qkv),
               [&](int64_t row, int64_t panel, const float* values) {
                 store_lanes(layer.qkv, w.qkv + row * width, panel, values);
               });
      heads(t, layer, number);
      attention(t, layer, number);
      add(t, Phase::output, layer.output, prepare(t, w.attended, layer.output), layer.after_attention);
      gate(t, layer.gate_up, prepare(t, layer.before_mlp, layer.gate_up));
      add(t, Phase::down, layer.down, prepare(t, w.middle, layer.down), layer.after_mlp);
    }
    for (int64_t row = t.number; row < rows.tokens; row += t.count)
      rms_norm(x + row * g.hidden, last.weight, g.hidden, g.eps, x + row * g.hidden);
    t.mark(Phase::norms);
  }
};

}  // namespace OCTAVO_ISA

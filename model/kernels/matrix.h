// A packed weight as torch meets it: owns its memory, packs, multiplies, and has its register tiles measured.
#pragma once

#include "measure.h"

namespace {

struct Matrix : torch::CustomClassHolder {
  octavo::Matrix m{};
  Tensor data, scales, bias;

  // weight [outputs, inputs], or [2 outputs, inputs] where gated: gates before ups.
  Matrix(const Tensor& weight, const optional<Tensor>& given_bias, const std::string& kind, bool gated) {
    TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be contiguous, [outputs, inputs]");
    const std::string kinds[] = {"float32", "float16", "bfloat16", "int8", "int4"};  // in the order of Kind
    const auto* found = std::find(std::begin(kinds), std::end(kinds), kind);
    TORCH_CHECK(found != std::end(kinds), "unknown kind ", kind);
    kind_of(weight, "weight");
    m.kind = Kind(found - kinds);
    m.gated = gated;
    m.outputs = weight.size(0) / (gated ? 2 : 1);
    m.inputs = weight.size(1);
    m.panels = kernels.panel_count(gated, m.outputs);
    const int64_t lanes = m.panels * kernels.panel;
    data = carve(m.panels * kernels.panel_bytes(m.kind, m.inputs));
    m.data = data.data_ptr();
    if (m.kind == Kind::int8) {
      scales = at::zeros({lanes}, at::kFloat);
      m.scales = pointer<float>(scales);
    }
    if (given_bias) {
      checked(*given_bias, at::kFloat, {weight.size(0)}, "bias");
      bias = at::zeros({lanes}, at::kFloat);
      m.bias = pointer<float>(bias);
      for (int64_t lane = 0; lane < lanes; lane++) {
        const int64_t row = kernels.source_row(m, lane / kernels.panel, int(lane % kernels.panel));
        if (row >= 0) m.bias[lane] = pointer<float>(*given_bias)[row];
      }
    }
    at::parallel_for(0, m.panels, 1, [&](int64_t first, int64_t last) {
      for (int64_t panel = first; panel < last; panel++) pack(weight, panel);
    });
  }

  void pack(const Tensor& weight, int64_t panel) {
    const int64_t stride = (m.inputs + MOST_LANES - 1) / MOST_LANES * MOST_LANES;
    std::vector<float> rows(kernels.panel * stride);
    for (int lane = 0; lane < kernels.panel; lane++) {
      const int64_t row = kernels.source_row(m, panel, lane), from = row * m.inputs;
      float* to = rows.data() + lane * stride;
      if (row < 0) continue;
      if (weight.scalar_type() == at::kFloat) std::copy_n(pointer<float>(weight) + from, m.inputs, to);
      if (weight.scalar_type() == at::kHalf) std::copy_n(pointer<at::Half>(weight) + from, m.inputs, to);
      if (weight.scalar_type() == at::kBFloat16) std::copy_n(pointer<at::BFloat16>(weight) + from, m.inputs, to);
    }
    kernels.pack_panel(m, panel, rows.data(), stride);
  }

  int64_t nbytes() const {
    int64_t total = data.nbytes();
    for (const Tensor& t : {scales, bias}) total += t.defined() ? t.nbytes() : 0;
    return total;
  }

  // Panels of a register tile for steps of up to 1, 2, 3, 4, 6, … rows: measured, or as another weight of this shape has
  // them.
  std::vector<int64_t> measure() {
    m.tiles = measured(m);
    return {std::begin(m.tiles.width), std::end(m.tiles.width)};
  }

  void set_tiles(const std::vector<int64_t>& widths) {
    TORCH_CHECK(widths.size() == std::size(m.tiles.width), "tiles must be ", std::size(m.tiles.width), " widths");
    for (int64_t width : widths)
      TORCH_CHECK(std::count(std::begin(octavo::WIDTHS), std::end(octavo::WIDTHS), width), "no tile has the width ", width);
    std::copy(widths.begin(), widths.end(), m.tiles.width);
  }

  // x [rows, inputs] float32 → [rows, outputs] float32; of a gated one [rows, 2 outputs].
  Tensor multiply(const Tensor& x) {
    Tensor y = at::empty({x.size(0), m.outputs * (m.gated ? 2 : 1)}, at::kFloat);
    each_thread(x, [&](const octavo::Operand& operand, std::atomic<int64_t>& next, int) {
      kernels.multiply(m, operand, x.size(0), pointer<float>(y), nullptr, next);
    });
    return y;
  }

  // x as above → [rows] int64: the first of a row's largest outputs, none of which is written to memory. BAD_LOGITS where
  // one is NaN or +inf, or all are -inf.
  Tensor likeliest(const Tensor& x) {
    TORCH_CHECK(!m.gated, "a gated matrix has no likeliest output");
    const int64_t rows = x.size(0);
    std::vector<octavo::Peak> peaks(rows * at::get_num_threads());  // of a thread after another's
    each_thread(x, [&](const octavo::Operand& operand, std::atomic<int64_t>& next, int number) {
      kernels.multiply(m, operand, rows, nullptr, peaks.data() + rows * number, next);
    });
    Tensor found = at::empty({rows}, at::kLong);
    for (int64_t row = 0; row < rows; row++) {
      octavo::Peak peak;
      for (size_t at = row; at < peaks.size(); at += rows)
        if (peak < peaks[at]) peak = peaks[at];
      pointer<int64_t>(found)[row] = std::isfinite(peak.value) ? peak.output : octavo::BAD_LOGITS;
    }
    return found;
  }

  // All threads call work(operand, next, number of the thread), once the rows of x are in the form that is multiplied.
  template <class Work>
  void each_thread(const Tensor& x, Work work) {
    const int64_t rows = x.size(0);
    checked(x, at::kFloat, {rows, m.inputs}, "x");
    if (rows == 0) return;
    Tensor encoded = at::empty({rows * kernels.encoded_bytes(m.kind, m.inputs)}, at::kByte);
    Tensor factors = at::empty({rows}, at::kFloat);
    const octavo::Operand operand{pointer<float>(x), m.inputs, encoded.data_ptr(), pointer<float>(factors)};
    octavo::Barrier barrier;
    std::atomic<int64_t> next{0};
    parallel([&](const octavo::Thread& t) {
      for (int64_t row = t.number; row < rows; row += t.count) kernels.encode(m, operand, row);
      barrier.wait(t.count);
      work(operand, next, t.number);
    });
  }
};

using Handle = c10::intrusive_ptr<Matrix>;

}  // namespace

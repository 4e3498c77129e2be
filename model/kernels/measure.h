// Which register tiles a weight is multiplied with, by the number of rows: each width is tried on the weight itself.
#pragma once

#include <ctime>
#include <limits>

#include "host.h"

namespace {

constexpr int64_t SAMPLE = 1 << 19;  // weights times rows: some tens of microseconds
constexpr int TIMES = 5;             // the quickest counts: what else the machine does only makes it slower
constexpr double GAIN = 0.05;        // by less no width replaces the one before

// So many panels of a weight as one of its own.
octavo::Matrix part_of(const octavo::Matrix& m, int64_t first, int64_t count) {
  octavo::Matrix part = m;
  part.data = (char*)m.data + first * kernels.panel_bytes(m.kind, m.inputs);
  if (m.scales) part.scales = m.scales + first * kernels.panel;
  if (m.bias) part.bias = m.bias + first * kernels.panel;
  part.panels = count;
  part.outputs = count * kernels.panel / (m.gated ? 2 : 1);
  return part;
}

// A thread's own time says the same beside other processes, which no clock on the wall does.
double seconds_of_this_thread() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Each try takes the next sample of the weight, so that none finds it in a cache because of the one before.
octavo::Tiles measured(const octavo::Matrix& m) {
  const int64_t most = std::end(octavo::STEPS)[-1];
  const int64_t widest = std::min<int64_t>(std::end(octavo::WIDTHS)[-1], m.panels);
  const auto panels = [&](int64_t rows) {
    return std::clamp<int64_t>(SAMPLE / (rows * kernels.panel * m.inputs), widest, m.panels);
  };
  Tensor x = at::zeros({most, m.inputs}, at::kFloat), y = at::empty({most * panels(1) * kernels.panel}, at::kFloat);
  Tensor encoded = at::empty({most * kernels.encoded_bytes(m.kind, m.inputs)}, at::kByte);
  Tensor factors = at::empty({most}, at::kFloat);
  const octavo::Operand operand{pointer<float>(x), m.inputs, encoded.data_ptr(), pointer<float>(factors)};
  for (int64_t row = 0; row < most; row++) kernels.encode(m, operand, row);

  int64_t first = 0;
  const auto seconds = [&](int width, int64_t rows) {
    const int64_t count = panels(rows);
    if (first + count > m.panels) first = 0;
    octavo::Matrix part = part_of(m, first, count);
    first += count;
    std::fill(std::begin(part.tiles.width), std::end(part.tiles.width), uint8_t(width));
    std::atomic<int64_t> next{0};
    const double began = seconds_of_this_thread();
    kernels.multiply(part, operand, rows, pointer<float>(y), nullptr, next);
    return seconds_of_this_thread() - began;
  };
  octavo::Tiles tiles;
  for (size_t i = 0; i < std::size(octavo::STEPS); i++) {
    double quickest[std::size(octavo::WIDTHS)];
    std::fill(std::begin(quickest), std::end(quickest), std::numeric_limits<double>::infinity());
    for (int time = 0; time < TIMES; time++)
      for (size_t w = 0; w < std::size(octavo::WIDTHS); w++)
        quickest[w] = std::min(quickest[w], seconds(octavo::WIDTHS[w], octavo::STEPS[i]));
    const auto* usual = std::find(std::begin(octavo::WIDTHS), std::end(octavo::WIDTHS), tiles.width[i]);
    const auto* best = std::min_element(std::begin(quickest), std::end(quickest));
    if (*best < (1 - GAIN) * quickest[usual - octavo::WIDTHS]) tiles.width[i] = octavo::WIDTHS[best - quickest];
  }
  return tiles;
}

}  // namespace

// Compiled once per instruction set, with OCTAVO_ISA as its namespace: see ISAS in build.py.
#include "sampler.h"
#include "step.h"

namespace OCTAVO_ISA {

using octavo::Peak;

// The peak of a row, now that a panel more is known.
static void lift(Peak& peak, const float* values, int64_t first, int64_t last) {
  vi more = {};  // or NaN
  for (int j = 0; j < PANEL; j += W) more |= ~(vi)(load<vf>(values + j) <= splat(peak.value));
  if (!any(more)) return;  // nearly always: a larger one comes ever more rarely
  for (int64_t output = first; output < last; output++) {
    const Peak found{values[output - first], output};
    if (peak < found) peak = found;
  }
}

static void multiply_all(const Matrix& m, const Operand& x, int64_t rows, float* y, Peak* peaks,
                         std::atomic<int64_t>& next) {
  const int64_t outputs = m.outputs;
  // One call for both: the tiles are compiled once.
  multiply_next(m, x, rows, next, [&](int64_t row, int64_t panel, const float* values) {
    if (peaks) return lift(peaks[row], values, panel * PANEL, std::min((panel + 1) * PANEL, outputs));
    if (!m.gated) return store_lanes(m, y + row * outputs, panel, values);
    const int64_t lanes = std::min<int64_t>(W, outputs - panel * W);
    for (int half = 0; half < 2; half++)
      std::memcpy(y + (2 * row + half) * outputs + panel * W, values + half * W, lanes * sizeof(float));
  });
}

static void decode(const octavo::Decode& d, const Thread& t) { Step{d}.run(t); }

extern const octavo::Kernels kernels;
const octavo::Kernels kernels = {
    DIM,           LANES,      W,          sizeof(Scratch), PANEL,        panel_count, panel_bytes,
    encoded_bytes, source_row, pack_panel, encode,          multiply_all, cut,         attend_all, decode,
};

}  // namespace OCTAVO_ISA

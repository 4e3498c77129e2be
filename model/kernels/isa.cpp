// Compiled once per instruction set, with OCTAVO_ISA as its namespace: see ISAS in build.py.
#include "sampler.h"
#include "step.h"

namespace OCTAVO_ISA {

// y [rows, outputs]; of a gated matrix [rows, 2 outputs], gates before ups.
static void multiply_all(const Matrix& m, const Operand& x, int64_t rows, float* y, std::atomic<int64_t>& next) {
  const int64_t outputs = m.outputs;
  multiply_next(m, x, rows, next, [&](int64_t row, int64_t panel, const float* values) {
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

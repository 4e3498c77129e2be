// The kernels as torch classes and operators: checks shapes and types, owns memory, opens the parallel region.
#include "draws.h"
#include "matrix.h"

namespace {

// Those of StepInputs: blocks [groups, tokens], tables [groups, rows, columns].
octavo::Rows rows_of(const Tensor& blocks, const Tensor& offsets, const Tensor& row_starts, const Tensor& starts,
                     const Tensor& counts, const Tensor& tables) {
  TORCH_CHECK(blocks.dim() == 2 && tables.dim() == 3, "blocks and tables must be those of all groups");
  const int64_t groups = blocks.size(0), tokens = blocks.size(1), rows = starts.size(0);
  checked(blocks, at::kLong, {groups, tokens}, "blocks"), checked(offsets, at::kLong, {tokens}, "offsets");
  checked(row_starts, at::kLong, {rows + 1}, "row_starts"), checked(starts, at::kLong, {rows}, "starts");
  checked(counts, at::kLong, {rows}, "counts"), checked(tables, at::kLong, {groups, rows, tables.size(2)}, "tables");
  return {groups, tokens, rows, pointer<int64_t>(blocks), pointer<int64_t>(offsets), pointer<int64_t>(row_starts),
          pointer<int64_t>(starts), pointer<int64_t>(counts), pointer<int64_t>(tables), tables.size(2)};
}

// tiles [blocks, kv_heads, block_size, dim], or where they are codes uint8 [blocks, kv_heads, tile_bytes].
octavo::Plane plane_of(const Tensor& tiles, int64_t kv_heads, int64_t block_size, int64_t dim, const char* name) {
  TORCH_CHECK(tiles.dim() >= 3 && tiles.size(1) == kv_heads && tiles.is_contiguous() && tiles.device().is_cpu(), name,
              " must be contiguous tiles [blocks, kv_heads, …] on the CPU");
  if (tiles.scalar_type() != at::kByte) {
    kind_of(tiles, name);
    TORCH_CHECK(tiles.dim() == 4 && tiles.size(2) == block_size && tiles.size(3) == dim, name,
                " must be [blocks, kv_heads, block_size, dim]");
    return {pointer<char>(tiles), block_size * dim, dim, 0, nullptr};
  }
  const int64_t size = tiles.size(2), row = size / block_size - 2;
  const int bits = int(row * 8 / dim);
  TORCH_CHECK(block_size % 16 == 0 && (bits == 8 || (bits == 4 && dim % 16 == 0)) && size == block_size * (dim * bits / 8 + 2), name,
              " must have tiles of 8-bit or 4-bit codes and their scales");
  return {pointer<char>(tiles), size, row, bits, nullptr};
}

// Keys with their fit [4, kv_heads, dim], of the first of so many layers.
octavo::Plane keys_of(const Tensor& tiles, const optional<Tensor>& fit, int64_t layers, int64_t kv_heads,
                      int64_t block_size, int64_t dim) {
  octavo::Plane plane = plane_of(tiles, kv_heads, block_size, dim, "keys");
  if (fit) plane.fit = pointer<float>(checked(*fit, at::kFloat, {layers, 4, kv_heads, dim}, "fit"));
  TORCH_CHECK((plane.bits != 0) == fit.has_value(), "keys as codes, and no others, have a fit");
  return plane;
}

Kind pool_kind(const Tensor& tiles) { return tiles.scalar_type() == at::kByte ? Kind::int8 : kind_of(tiles, "keys"); }

struct Decoder : torch::CustomClassHolder {
  octavo::Geometry g{};
  std::vector<octavo::Layer> layers;
  std::vector<octavo::Laps> laps;  // one a thread
  std::vector<Handle> matrices;
  std::vector<Tensor> norms;
  octavo::Norm last;
  octavo::Portions cuts[2];
  std::vector<std::atomic<int64_t>> counters;
  octavo::Barrier barrier;
  Buffer buffers, parts;
  int64_t window = 0;
  bool timed = false;

  Decoder(int64_t hidden, int64_t intermediate, int64_t heads, int64_t kv_heads, int64_t dim, double eps, double scale,
          double softcap, double residual_multiplier, const std::string& activation) {
    TORCH_CHECK(activation == "silu" || activation == "gelu_tanh", "unknown activation ", activation);
    g = {hidden, intermediate, heads, kv_heads, dim, float(eps), float(scale), float(softcap),
         float(residual_multiplier),
         activation == "silu" ? octavo::Activation::silu : octavo::Activation::gelu_tanh};
  }

  octavo::Norm norm(const optional<Tensor>& weight, int64_t size, const char* name) {
    if (!weight) return {};
    norms.push_back(checked(weight->reshape({-1}), at::kFloat, {size}, name));
    return {pointer<float>(norms.back())};
  }

  const octavo::Matrix& matrix(const Handle& handle, int64_t outputs, int64_t inputs, bool gated, const char* name) {
    const octavo::Matrix& m = handle->m;
    TORCH_CHECK(m.outputs == outputs && m.inputs == inputs && m.gated == gated, name, " must be [", outputs, ", ",
                inputs, "]", gated ? " gated" : "");
    matrices.push_back(handle);
    return m;
  }

  // norms: before and after attention, before and after the MLP, of all heads, of all queries, of all keys.
  void add_layer(const Handle& qkv, const Handle& output, const Handle& gate_up, const Handle& down,
                 const std::vector<optional<Tensor>>& given, int64_t layer_window, int64_t rope) {
    TORCH_CHECK(given.size() == 7, "a layer has seven norms, each a tensor or None");
    const int64_t q = g.heads * g.dim, kv = g.kv_heads * g.dim;
    octavo::Layer layer{};
    layer.qkv = matrix(qkv, q + 2 * kv, g.hidden, false, "qkv");
    layer.output = matrix(output, g.hidden, q, false, "output");
    layer.gate_up = matrix(gate_up, g.intermediate, g.hidden, true, "gate_up");
    layer.down = matrix(down, g.hidden, g.intermediate, false, "down");
    layer.before_attention = norm(given[0], g.hidden, "before_attention");
    layer.after_attention = norm(given[1], g.hidden, "after_attention");
    layer.before_mlp = norm(given[2], g.hidden, "before_mlp");
    layer.after_mlp = norm(given[3], g.hidden, "after_mlp");
    layer.qk_heads = norm(given[4], q + kv, "qk_heads");
    layer.q_full = norm(given[5], q, "q_full");
    layer.k_full = norm(given[6], kv, "k_full");
    layer.window = layer_window;
    layer.rope = rope;
    TORCH_CHECK(!layer_window || !window || window == layer_window, "layers must share one window");
    window = std::max(window, layer_window);
    layers.push_back(layer);
  }

  void set_last_norm(const Tensor& weight) { last = norm(weight, g.hidden, "last_norm"); }

  // x [tokens, hidden] float32 becomes the hidden states for the head; keys and values go to the pool.
  // keys and values: a plane of a slot behind the other; fit [layers, 4, kv_heads, dim]; places [layers, 2]: slot and
  // group. ropes: of each rotary table cos and sin [positions, half], and which rows the tokens have, [tokens].
  void forward(const Tensor& x, const Tensor& keys, const Tensor& values, const optional<Tensor>& fit,
               int64_t block_size, const Tensor& places, const std::vector<Tensor>& ropes, const Tensor& blocks,
               const Tensor& offsets, const Tensor& row_starts, const Tensor& starts, const Tensor& counts,
               const Tensor& tables) {
    const octavo::Rows rows = rows_of(blocks, offsets, row_starts, starts, counts, tables);
    const int64_t tokens = rows.tokens;
    checked(x, at::kFloat, {tokens, g.hidden}, "x");
    const int64_t count = int64_t(layers.size());
    checked(places, at::kLong, {count, 2}, "places");
    TORCH_CHECK(keys.size(0) == values.size(0) && keys.scalar_type() == values.scalar_type() &&
                    keys.stride(0) == values.stride(0),
                "keys and values must be of one type and lie alike");
    const octavo::Pool kv{pool_kind(keys), block_size, keys_of(keys[0], fit, count, g.kv_heads, block_size, g.dim),
                          plane_of(values[0], g.kv_heads, block_size, g.dim, "values"),
                          int64_t(keys.stride(0) * keys.element_size()), 4 * g.kv_heads * g.dim,
                          pointer<int64_t>(places)};
    std::vector<int64_t> groups[2];  // of layers without a window, and with
    for (int64_t number = 0; number < count; number++) {
      const int64_t group = kv.group(number);
      TORCH_CHECK(0 <= kv.places[2 * number] && kv.places[2 * number] < keys.size(0) && 0 <= group &&
                      group < rows.groups,
                  "the pool has another shape than the model");
      std::vector<int64_t>& all = groups[layers[number].window != 0];
      if (std::find(all.begin(), all.end(), group) == all.end()) all.push_back(group);
    }
    std::vector<octavo::Rotary> rotaries;
    for (size_t i = 0; i + 2 < ropes.size(); i += 3) {
      const int64_t positions = ropes[i].size(0), half = ropes[i].size(-1);
      TORCH_CHECK(2 * half <= g.dim, "rotary tables are wider than a head");
      const int64_t* at = pointer<int64_t>(checked(ropes[i + 2], at::kLong, {tokens}, "places of a rotary table"));
      for (int64_t row = 0; row < tokens; row++)
        TORCH_CHECK(0 <= at[row] && at[row] < positions, "position ", at[row], " of ", positions);
      rotaries.push_back({pointer<float>(checked(ropes[i], at::kFloat, {positions, half}, "cos")),
                          pointer<float>(checked(ropes[i + 1], at::kFloat, {positions, half}, "sin")), at, half});
    }
    TORCH_CHECK(last.weight, "the last norm is missing");
    for (const octavo::Layer& layer : layers)
      TORCH_CHECK(layer.rope < (int64_t)rotaries.size(), "a rotary table is missing");

    const size_t phases = octavo::COUNTED * layers.size();
    if (counters.size() != phases) counters = std::vector<std::atomic<int64_t>>(phases);
    for (auto& counter : counters) counter = 0;
    const octavo::Workspace workspace = reserve(rows, groups, kv.block_size);
    const octavo::Decode decode{g, layers.data(), count, kv, rows, rotaries.data(), pointer<float>(x),
                                last, workspace};
    parallel([&](const octavo::Thread& t) { kernels.decode(decode, t); }, timed ? &laps : nullptr);
  }

  // Nanoseconds since the last call, [threads, phases]; the first call begins it. Costs microseconds a step.
  Tensor spent() {
    timed = true;
    Tensor all = at::zeros({(int64_t)laps.size(), int64_t(octavo::Phase::count)}, at::kLong);
    for (size_t i = 0; i < laps.size(); i++)
      std::copy(std::begin(laps[i].spent), std::end(laps[i].spent), pointer<int64_t>(all[i]));
    laps.clear();
    return all;
  }

  octavo::Workspace reserve(const octavo::Rows& rows, const std::vector<int64_t>* groups, int64_t block_size) {
    int64_t floats = 0;
    for (int cut = 0; cut < 2; cut++)
      if (!groups[cut].empty())
        floats = std::max(floats, kernels.cut(rows, g, cut ? window : 0, groups[cut], block_size, cuts[cut]));
    const int64_t q = g.heads * g.dim, width = q + 2 * g.kv_heads * g.dim;
    const int64_t widths[] = {g.hidden, width, q, g.intermediate, g.hidden, 1};
    int64_t encoded = 0;
    for (const octavo::Layer& layer : layers)
      for (const octavo::Matrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
        encoded = std::max(encoded, kernels.encoded_bytes(m->kind, m->inputs));
    int64_t bytes = encoded * rows.tokens;
    for (int64_t w : widths) bytes += (w * rows.tokens * 4 + 63) / 64 * 64;
    char* at = buffers.take(bytes);
    float* parted[6];
    for (int i = 0; i < 6; i++) parted[i] = (float*)at, at += (widths[i] * rows.tokens * 4 + 63) / 64 * 64;
    return {parted[0], parted[1], parted[2], parted[3], parted[4], at, parted[5], (float*)parts.take(floats * 4),
            {&cuts[0], &cuts[1]}, counters.data(), &barrier};
  }
};

// query [tokens, heads, dim] float32; keys and values: planes of one layer; fit [1, 4, kv_heads, dim] → as query.
Tensor attention(const Tensor& query, const Tensor& keys, const Tensor& values, const optional<Tensor>& fit,
                 int64_t block_size, const Tensor& blocks, const Tensor& offsets, const Tensor& row_starts, const Tensor& starts,
                 const Tensor& counts, const Tensor& tables, double scale, int64_t window, double softcap) {
  const octavo::Rows rows = rows_of(blocks, offsets, row_starts, starts, counts, tables);
  const int64_t heads = query.size(1), dim = query.size(2), kv_heads = keys.size(1);
  checked(query, at::kFloat, {rows.tokens, heads, dim}, "query");
  TORCH_CHECK(values.scalar_type() == keys.scalar_type() && values.size(0) == keys.size(0),
              "keys and values must be of one type and as many blocks");
  octavo::Geometry g{};
  g.heads = heads, g.kv_heads = kv_heads, g.dim = dim;
  octavo::Portions cut;
  Tensor out = at::empty_like(query);
  Tensor parts = at::empty({kernels.cut(rows, g, window, {0}, block_size, cut)}, at::kFloat);
  const octavo::Attended attended{pointer<float>(query), heads * dim, pointer<float>(out),
                                  keys_of(keys, fit, 1, kv_heads, block_size, dim),
                                  plane_of(values, kv_heads, block_size, dim, "values"), block_size, heads, kv_heads,
                                  dim, window, 0, float(scale), float(softcap), pointer<float>(parts)};
  const Kind kind = pool_kind(keys);
  std::atomic<int64_t> counter{0};
  octavo::Barrier barrier;
  parallel([&](const octavo::Thread& t) {
    kernels.attend(attended, kind, rows, cut, counter, barrier, t);
  });
  return out;
}

bool attends(int64_t heads, int64_t kv_heads, int64_t dim) {
  return dim <= kernels.largest_head && dim % kernels.head_multiple == 0 && heads % kv_heads == 0 &&
         heads / kv_heads <= kernels.most_shared;
}

}  // namespace

#define LIBRARY(name, m) TORCH_LIBRARY(name, m)
LIBRARY(OCTAVO_LIBRARY, m) {
  m.class_<Matrix>("Matrix")
      .def(torch::init<const Tensor&, const optional<Tensor>&, const std::string&, bool>())
      .def("multiply", &Matrix::multiply)
      .def("likeliest", &Matrix::likeliest)
      .def("measure", &Matrix::measure)
      .def("set_tiles", &Matrix::set_tiles)
      .def("nbytes", &Matrix::nbytes);
  m.class_<Decoder>("Decoder")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t, int64_t, double, double, double, double, const std::string&>())
      .def("add_layer", &Decoder::add_layer)
      .def("set_last_norm", &Decoder::set_last_norm)
      .def("forward", &Decoder::forward)
      .def("spent", &Decoder::spent);
  m.def("attention", &attention);
  m.def("attends", &attends);
  m.def("constrain", &constrain);
  m.def("draw", &draw);
  m.def("logprobs", &logprobs);
}

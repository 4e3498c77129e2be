// The operators of the sampler, a row of logits at a time. Of library.cpp alone.
#pragma once

#include <limits>

#include "host.h"

namespace {

// `work` is called for every row, by any thread, with memory for a vocabulary. A few rows are not worth a region.
template <class Work>
void each_row(int64_t rows, int64_t vocab, Work work) {
  const int64_t bytes = (OCTAVO_ISA::sampling.scratch_bytes(vocab) + 63) / 64 * 64;
  static thread_local Buffer buffer;
  char* scratch = buffer.take(bytes * at::get_num_threads());
  std::atomic<int64_t> next{0};
  const auto share = [&](const octavo::Thread& t) {
    for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) work(row, scratch + t.number * bytes);
  };
  if (rows * vocab <= 1 << 18) share({0, 1, nullptr});
  else parallel(share);
}

// logits [rows, vocab] float32; wishes [rows, 5] float64 → tokens [rows], NO_TOKEN or BAD_LOGITS among them.
Tensor draw(const Tensor& logits, const Tensor& wishes) {
  const int64_t rows = wishes.size(0), vocab = logits.size(1);
  checked(logits, at::kFloat, {rows, vocab}, "logits"), checked(wishes, at::kDouble, {rows, 5}, "wishes");
  Tensor tokens = at::empty({rows}, at::kLong);
  each_row(rows, vocab, [&](int64_t row, void* scratch) {
    pointer<int64_t>(tokens)[row] = OCTAVO_ISA::sampling.draw(pointer<float>(logits) + row * vocab, vocab,
                                                              pointer<octavo::Wish>(wishes)[row], scratch);
  });
  return tokens;
}

// Every token of a row whose bit in the row's mask is not set becomes -inf. scores [any, vocab] float32, changed in place;
// rows [n]; masks [n, bytes] uint8, the lowest bit first.
void constrain(const Tensor& scores, const Tensor& rows, const Tensor& masks) {
  const int64_t n = rows.size(0), vocab = scores.size(1), bytes = masks.size(1);
  checked(scores, at::kFloat, {scores.size(0), vocab}, "scores"), checked(rows, at::kLong, {n}, "rows");
  checked(masks, at::kByte, {n, bytes}, "masks");
  TORCH_CHECK(8 * bytes >= vocab, "masks are too short");
  // What the eight tokens of a byte get added: nothing, or minus infinity.
  static const std::vector<float> added = [] {
    std::vector<float> table(256 * 8);
    for (int64_t i = 0; i < 256 * 8; i++) table[i] = i / 8 >> i % 8 & 1 ? 0.f : -std::numeric_limits<float>::infinity();
    return table;
  }();
  for (int64_t i = 0; i < n; i++) {
    const int64_t row = pointer<int64_t>(rows)[i];
    TORCH_CHECK(row >= 0 && row < scores.size(0), "there is no row ", row);
  }
  each_row(n, vocab, [&](int64_t i, void*) {
    float* score = pointer<float>(scores) + pointer<int64_t>(rows)[i] * vocab;
    const uint8_t* mask = pointer<uint8_t>(masks) + i * bytes;
    for (int64_t token = 0; token < vocab; token += 8) {
      if (mask[token / 8] == 0xFF) continue;
      const float* add = added.data() + 8 * mask[token / 8];
      const int64_t count = std::min<int64_t>(8, vocab - token);
      if (count == 8) for (int64_t k = 0; k < 8; k++) score[token + k] += add[k];
      else for (int64_t k = 0; k < count; k++) score[token + k] += add[k];
    }
  });
}

// Of one token in each of some rows: values [n, 1 + most] float64 and numbers [n, 1 + most], see Sampling::logprobs.
std::tuple<Tensor, Tensor> logprobs(const Tensor& logits, const Tensor& rows, const Tensor& tokens,
                                    const Tensor& counts, int64_t most) {
  const int64_t n = rows.size(0), vocab = logits.size(1);
  checked(logits, at::kFloat, {logits.size(0), vocab}, "logits"), checked(rows, at::kLong, {n}, "rows");
  checked(tokens, at::kLong, {n}, "tokens"), checked(counts, at::kLong, {n}, "counts");
  for (int64_t i = 0; i < n; i++) {
    const int64_t row = pointer<int64_t>(rows)[i], token = pointer<int64_t>(tokens)[i];
    TORCH_CHECK(row >= 0 && row < logits.size(0), "there is no row ", row);
    TORCH_CHECK(token >= 0 && token < vocab, "there is no token ", token);
    const int64_t count = pointer<int64_t>(counts)[i];
    TORCH_CHECK(count >= 0 && count <= most, "counts must be from 0 to ", most);
  }
  Tensor values = at::empty({n, 1 + most}, at::kDouble), numbers = at::empty({n, 1 + most}, at::kLong);
  each_row(n, vocab, [&](int64_t i, void* scratch) {
    OCTAVO_ISA::sampling.logprobs(pointer<float>(logits) + pointer<int64_t>(rows)[i] * vocab, vocab,
                                  pointer<int64_t>(tokens)[i], pointer<int64_t>(counts)[i],
                                  pointer<double>(values) + i * (1 + most), pointer<int64_t>(numbers) + i * (1 + most),
                                  scratch);
  });
  return {values, numbers};
}

}  // namespace

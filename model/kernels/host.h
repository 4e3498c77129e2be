// What the torch side of the kernels stands on: checks of tensors, memory, the parallel region. Of library.cpp alone.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <omp.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "program.h"
#include "sampling.h"

namespace OCTAVO_ISA {
extern const octavo::Kernels kernels;
extern const octavo::Sampling sampling;
}

namespace {

using at::Tensor;
using octavo::Kind;
using std::optional;

const octavo::Kernels& kernels = OCTAVO_ISA::kernels;
constexpr int64_t MOST_LANES = 16;  // of any instruction set's vectors

Kind kind_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case at::kFloat: return Kind::f32;
    case at::kHalf: return Kind::f16;
    case at::kBFloat16: return Kind::bf16;
    default: TORCH_CHECK(false, name, " must be float32, float16 or bfloat16");
  }
}

const Tensor& checked(const Tensor& t, at::ScalarType type, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && t.device().is_cpu(), name, " must be a contiguous ", type,
              " tensor on the CPU");
  TORCH_CHECK(t.sizes() == shape, name, " must have the shape ", shape, ", not ", t.sizes());
  return t;
}

template <class T>
T* pointer(const Tensor& t) {
  return (T*)t.data_ptr();
}

// One region for a whole step. `work` is called by every thread with its number and their count.
template <class Work>
void parallel(Work work, std::vector<octavo::Laps>* laps = nullptr) {
  static thread_local std::vector<Tensor> scratch;  // per calling thread: one buffer for each of the region's threads
  const int wanted = at::get_num_threads();
  while ((int)scratch.size() < wanted) scratch.push_back(at::empty({kernels.scratch_bytes}, at::kByte));
  std::vector<Tensor>& mine = scratch;
  if (laps) laps->resize(wanted);
#pragma omp parallel num_threads(wanted)
  {
    const int number = omp_get_thread_num();
    work(octavo::Thread{number, omp_get_num_threads(), mine[number].data_ptr(), laps ? &(*laps)[number] : nullptr});
  }
}

// Memory for weights, side by side in large pieces, which torch asks huge pages for (THP_MEM_ALLOC_ENABLE): every step
// reads all of them, and a page of 4 KiB is through in a microsecond.
Tensor carve(int64_t bytes) {
  constexpr int64_t PIECE = 64 << 20;
  static std::mutex mutex;
  static Tensor piece;
  static int64_t used;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!piece.defined() || used + bytes > piece.numel()) {
    piece = at::empty({std::max(bytes, PIECE)}, at::kByte);
    used = 0;
  }
  const int64_t begin = used;
  used += (bytes + 63) / 64 * 64;
  return piece.narrow(0, begin, bytes);
}

// Grows to the largest step there has been, and stays.
struct Buffer {
  Tensor memory;
  char* take(int64_t bytes) {
    if (!memory.defined() || memory.nbytes() < (size_t)bytes) memory = at::empty({bytes}, at::kByte);
    return (char*)memory.data_ptr();
  }
};

}  // namespace

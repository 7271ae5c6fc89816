// Gradients of a batch's ids, and their sums per row. Contributions to a row are ordered by (feature, sample, id). They are
// added from left to right within blocks of 256 samples, and then the blocks from left to right.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/row_update/chunk.h"
#include "ops/simd.h"

namespace meseta {

constexpr int kBlockBits = 8;  // 256 samples.

struct GradientSource {
  const float* gradient;  // Gradient of the first bag or id.
  int64_t stride;         // Distance between bags (or ids) in floats.
  bool per_id;            // Whether every id has its own gradient.
  bool weighted;
  const int64_t* offsets;  // [num_bags + 1].
};

struct UpdateBatch {
  const void* ids;
  bool wide_ids;
  const int64_t* offsets;
  int64_t num_ids, num_bags;
  const float* weights;
  uint32_t step;
};

struct UpdateTable {
  TableTarget target;
  std::vector<GradientSource> features;
  int64_t num_ids;
  bool needs_positions;  // Whether ids of a bag have different gradients or weights.
  int sample_bits;       // Bits of the number of a bag in its feature, at least those of a block.
  int line_bits, position_bits;  // Bits of an entry's payload, which is a line or a position.
};

// Gradient of an entry: its address, block and weight.
struct WeightedGradient {
  const float* gradient;
  uint64_t block;
  float weight;
  bool weighted;
};

// The payload of an entry is a line of a matrix, which has the bags of all features one below the other. Each feature
// starts at a multiple of a block.
struct LinePayload {
  static constexpr bool kWeighted = false;
  const float* first;
  int64_t stride;
  uint64_t mask;

  const float* gradient(uint64_t entry) const { return first + int64_t(entry & mask) * stride; }
  WeightedGradient operator()(uint64_t entry) const { return {gradient(entry), (entry & mask) >> kBlockBits, 1.0f, false}; }
};

// The payload of an entry is its position among the ids of all features. It is used if ids of a bag have different
// gradients or weights, or if several features have too many bags to be copied into lines.
struct PositionPayload {
  static constexpr bool kWeighted = true;
  const UpdateTable& table;
  const UpdateBatch& batch;
  const uint32_t* samples;
  uint64_t mask;

  const float* gradient(uint64_t entry) const { return (*this)(entry).gradient; }
  WeightedGradient operator()(uint64_t entry) const {
    int64_t position = int64_t(entry & mask);
    const int64_t sample = samples[position];
    size_t f = 0;
    for (;; ++f) {
      const int64_t own = table.features[f].offsets[batch.num_bags] - table.features[f].offsets[0];
      if (position < own) break;
      position -= own;
    }
    const GradientSource& feature = table.features[f];
    const uint64_t block = (uint64_t(f) << table.sample_bits | uint64_t(sample)) >> kBlockBits;
    const int64_t line = feature.per_id ? position : sample;
    WeightedGradient found{feature.gradient + line * feature.stride, block, 1.0f, false};
    if (feature.weighted) {
      found.weight = batch.weights[feature.offsets[0] + position];
      found.weighted = true;
    }
    return found;
  }
};

// Prefetches the gradients of coming entries, several together, so that their address translations overlap.
template <typename Find>
struct GradientPrefetcher {
  const Find& find;
  const uint64_t* next;  // First entry that is not prefetched yet.
  const uint64_t* end;
  int64_t dim;
  static constexpr int64_t kPrefetchDistance = 16, kBurst = 64;

  void reach(const uint64_t* entry) {
    if (entry + kPrefetchDistance <= next) return;
    const uint64_t* stop = std::min(entry + kPrefetchDistance + kBurst, end);
    for (; next < stop; ++next) {
      const float* g = find.gradient(*next);
      for (int64_t c = 0; c < dim; c += kLanes) prefetch(g + c);
    }
  }
};

// Sum the contributions of a run of entries of one row, from `column` on: within blocks from left to right, then blocks.
template <int N, typename Find>
void sum_run(const Find& find, GradientPrefetcher<Find>& fetcher, const uint64_t* first, const uint64_t* last, int64_t column,
             int tail, float* out) {
  Vec total[N], block[N];
  const auto read = [&](const WeightedGradient& c, int j) {
    const float* at = c.gradient + column + kLanes * j;
    const Vec g = j == N - 1 && tail < kLanes ? load(at, tail) : load(at);
    if constexpr (Find::kWeighted) return c.weighted ? broadcast(c.weight) * g : g;
    return g;
  };
  WeightedGradient c = find(*first);
  for (int j = 0; j < N; ++j) block[j] = read(c, j);
  bool started = false;
  uint64_t current = c.block;
  for (const uint64_t* e = first + 1; e < last; ++e) {
    fetcher.reach(e);
    c = find(*e);
    if (c.block != current) {
      for (int j = 0; j < N; ++j) total[j] = started ? total[j] + block[j] : block[j];
      for (int j = 0; j < N; ++j) block[j] = read(c, j);
      started = true;
      current = c.block;
    } else {
      for (int j = 0; j < N; ++j) block[j] = block[j] + read(c, j);
    }
  }
  for (int j = 0; j < N; ++j) store(out + kLanes * j, started ? total[j] + block[j] : block[j]);
}

// As sum_run, with as many vectors as `width` columns need, at most N.
template <int N, typename Find>
void sum_columns(const Find& find, GradientPrefetcher<Find>& fetcher, const uint64_t* first, const uint64_t* last, int64_t column,
                 int64_t width, float* out) {
  if (width > kLanes * (N - 1)) {
    sum_run<N>(find, fetcher, first, last, column, int(width - kLanes * (N - 1)), out);
  } else if constexpr (N > 1) {
    sum_columns<N - 1>(find, fetcher, first, last, column, width, out);
  }
}

template <typename Find>
void sum_row(const Find& find, GradientPrefetcher<Find>& fetcher, const uint64_t* first, const uint64_t* last, int64_t dim,
             float* out) {
  constexpr int64_t kWidest = 8 * kLanes;
  for (int64_t c = 0; c < dim; c += kWidest)
    sum_columns<8>(find, fetcher, first, last, c, std::min(kWidest, dim - c), out + c);
}

// Copy the gradients of bags into lines, for ids that share them. The rows of a matrix as wide as many tables map to few
// sets of a cache, which then holds only a fraction of them.
inline void gather_lines(UpdateTable& table, int64_t num_bags, Buffer<float>& room) {
  constexpr int64_t kAhead = 8;
  const int64_t dim = table.target.dim, width = (dim + kLanes - 1) / kLanes * kLanes;
  const int64_t size = width << table.sample_bits;
  room.reserve(table.features.size() * size_t(size));
  float* to = room.data();
  for (GradientSource& f : table.features) {
    if (f.per_id) continue;
    const float* from = f.gradient;
    for (int64_t bag = 0; bag < num_bags; ++bag) {
      if (bag + kAhead < num_bags)
        for (int64_t c = 0; c < dim; c += kLanes) prefetch(from + (bag + kAhead) * f.stride + c);
      copy_row(from + bag * f.stride, dim, to + bag * width);
    }
    f.gradient = to;
    f.stride = width;
    to += size;
  }
}

}  // namespace meseta

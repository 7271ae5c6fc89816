// The gradients of a batch, and their sums per row in the contract's order: contributions to a row by (feature, sample,
// id), left to right inside blocks of 256 samples, blocks left to right.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/row_update/chunk.h"
#include "ops/simd.h"

namespace meseta {

constexpr int kBlockBits = 8;  // 256 samples

struct Feature {
  const float* gradient;  // of its first bag or id
  int64_t stride;         // floats from one bag (or id) to the next
  bool per_id;            // whether every id has a gradient of its own
  bool weighted;
  const int64_t* offsets;  // [num_bags + 1]
};

struct Batch {
  const void* ids;
  bool wide_ids;
  const int64_t* offsets;
  int64_t num_ids, num_bags;
  const float* weights;
  uint32_t step;
};

// Where the gradient of a contribution lies, and the sample that its block follows from. An entry of the sort holds the
// row above `payload_bits` and below it either (feature, sample), or the position, where ids of a bag differ in more
// than their row.
struct Table {
  Target target;
  std::vector<Feature> features;
  bool by_position;
  int sample_bits, payload_bits;
  int64_t num_ids;
};

// The gradient of one entry: an address, the block it belongs to, and its weight.
struct Contribution {
  const float* gradient;
  uint64_t block;
  float weight;
  bool weighted;
};

template <bool kByPosition>
struct Finder {
  const Table& table;
  const Batch& batch;
  const uint32_t* samples;
  uint64_t mask = (uint64_t{1} << table.payload_bits) - 1;
  uint64_t sample_mask = (uint64_t{1} << table.sample_bits) - 1;
  // Of the only feature of most tables.
  bool alone = table.features.size() == 1;
  const float* first = table.features[0].gradient;
  int64_t stride = table.features[0].stride;

  const float* gradient(uint64_t entry) const {
    if (!kByPosition && alone) return first + int64_t(entry & mask) * stride;
    return (*this)(entry).gradient;
  }

  Contribution operator()(uint64_t entry) const {
    const uint64_t payload = entry & mask;
    size_t f = 0;
    int64_t sample, position = 0;
    if constexpr (kByPosition) {
      sample = samples[payload];
      position = int64_t(payload);
      for (;; ++f) {
        const int64_t own = table.features[f].offsets[batch.num_bags] - table.features[f].offsets[0];
        if (position < own) break;
        position -= own;
      }
    } else {
      f = payload >> table.sample_bits;
      sample = int64_t(payload & sample_mask);
    }
    const Feature& feature = table.features[f];
    const uint64_t block = (uint64_t(f) << table.sample_bits | uint64_t(sample)) >> kBlockBits;
    if constexpr (!kByPosition) return {feature.gradient + sample * feature.stride, block, 1.0f, false};
    const int64_t line = feature.per_id ? position : sample;
    Contribution found{feature.gradient + line * feature.stride, block, 1.0f, false};
    if (feature.weighted) {
      found.weight = batch.weights[feature.offsets[0] + position];
      found.weighted = true;
    }
    return found;
  }
};

// Brings the gradients of coming entries, several at once, for the sake of the walks to their pages.
template <bool kByPosition>
struct Fetcher {
  const Finder<kByPosition>& find;
  const uint64_t* next;  // first entry that was not asked for
  const uint64_t* end;
  int64_t dim;
  static constexpr int64_t kAhead = 16, kBurst = 64;

  void reach(const uint64_t* entry) {
    if (entry + kAhead <= next) return;
    const uint64_t* stop = std::min(entry + kAhead + kBurst, end);
    for (; next < stop; ++next) {
      const float* g = find.gradient(*next);
      for (int64_t c = 0; c < dim; c += kLanes) prefetch(g + c);
    }
  }
};

// Sum of the contributions of a run of entries with one row: blocks from left to right, then their sums.
template <bool kByPosition, int N, typename Find>
void sum_run(const Find& find, Fetcher<kByPosition>& fetcher, const uint64_t* first, const uint64_t* last, int tail,
             float* out) {
  Vec total[N], block[N];
  const auto read = [&](const Contribution& c, int j) {
    const Vec g = j == N - 1 && tail < kLanes ? load(c.gradient + 16 * j, tail) : load(c.gradient + 16 * j);
    if constexpr (kByPosition) return c.weighted ? broadcast(c.weight) * g : g;
    return g;
  };
  Contribution c = find(*first);
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
  for (int j = 0; j < N; ++j) store(out + 16 * j, started ? total[j] + block[j] : block[j]);
}

// Rows wider than eight vectors: eight at a time.
template <bool kByPosition, int N, typename Find>
void sum_columns(const Find& find, Fetcher<kByPosition>& fetcher, const uint64_t* first, const uint64_t* last,
                 int64_t width, float* out) {
  if (width > 16 * (N - 1)) {
    sum_run<kByPosition, N>(find, fetcher, first, last, int(width - 16 * (N - 1)), out);
  } else if constexpr (N > 1) {
    sum_columns<kByPosition, N - 1>(find, fetcher, first, last, width, out);
  }
}

template <bool kByPosition>
void sum_row(const Finder<kByPosition>& find, Fetcher<kByPosition>& fetcher, const uint64_t* first,
             const uint64_t* last, int64_t dim, float* out) {
  for (int64_t c0 = 0; c0 < dim; c0 += 128) {
    const auto shifted = [&](uint64_t entry) {
      Contribution c = find(entry);
      c.gradient += c0;
      return c;
    };
    sum_columns<kByPosition, 8>(shifted, fetcher, first, last, std::min<int64_t>(128, dim - c0), out + c0);
  }
}

// Copy the gradients of bags side by side, for ids that share them: the rows of a matrix that is as wide as many tables lie
// in few sets of a cache, which then holds a fraction of them.
inline void gather_gradients(Table& table, int64_t num_bags, Buffer<float>& room) {
  constexpr int64_t kAhead = 8;
  const int64_t dim = table.target.dim, width = (dim + kLanes - 1) / kLanes * kLanes;
  room.reserve(table.features.size() * size_t(num_bags * width));
  float* to = room.data();
  for (Feature& f : table.features) {
    if (f.per_id) continue;
    const float* from = f.gradient;
    for (int64_t bag = 0; bag < num_bags; ++bag) {
      if (bag + kAhead < num_bags)
        for (int64_t c = 0; c < dim; c += kLanes) prefetch(from + (bag + kAhead) * f.stride + c);
      copy_row(from + bag * f.stride, dim, to + bag * width);
    }
    f.gradient = to;
    f.stride = width;
    to += num_bags * width;
  }
}

}  // namespace meseta

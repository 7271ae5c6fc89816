// Interface of the programs in programs.h: some touched rows, with all their elements in one loop, and numbers per row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "ops/row_update/rounding.h"
#include "ops/simd.h"

namespace meseta {

constexpr int64_t kChunkFloats = 2048, kMaxRows = 128;  // Per chunk. Its gradients fit into the first-level cache.
constexpr int kMaxBuffers = 4;                          // As in tools/fused_programs.py.

// Array aligned to cache lines. It grows as needed, without keeping its content.
template <typename T>
class Buffer {
 public:
  void reserve(size_t count) {
    if (count <= size_) return;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
    if (!data_) throw std::bad_alloc();
    size_ = count;
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

// Shard of a table.
struct TableTarget {
  void* weight;                   // [rows, dim].
  int64_t num_rows, dim;
  int64_t first_row, first_column;  // Start of the shard, for the random bits.
  uint64_t key;
  std::vector<float*> state;      // [rows, dim] or [rows].
  const float* uniforms;
  const int64_t* row_ids;         // [rows]: row of the shard that each row holds. Null: row i holds row i.
  uint32_t* marks;                // Marks of changed rows, see mark_rows. May be null.
  int64_t num_marks;              // Words.
  uint32_t* log;                  // Number of rows in a log of rows to be marked, then the rows. May be null.
  int64_t log_capacity;           // Rows.

  int64_t row(int64_t at) const { return row_ids == nullptr ? at : row_ids[at]; }
};

// Set out[k] to the sum of row k of `summands` [n, blocks, 16]: lanes as sum_lanes adds them, then blocks from left to
// right. `summands`, `sums` [n, blocks] and `out` must have space for 15 additional blocks or rows.
inline void sum_rows(const float* summands, int64_t n, int64_t blocks, float* sums, float* out) {
  const int64_t count = n * blocks;
  for (int64_t i = 0; i < count; i += kLanes) store((blocks == 1 ? out : sums) + i, sum_lanes16(summands + i * kLanes));
  if (blocks == 1) return;
  for (int64_t k = 0; k < n; ++k) {
    float total = sums[k * blocks];
    for (int64_t j = 1; j < blocks; ++j) total += sums[k * blocks + j];
    out[k] = total;
  }
}

// `to` must have space for whole vectors.
inline void copy_row(const float* from, int64_t dim, float* to) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) store(to + c, load(from + c));
  if (c < dim) store(to + c, load(from + c, int(dim - c)));
}

template <typename T>
class Chunk {
 public:
  const float* uniforms = nullptr;

  // Return the chunk of this thread, whose memory is kept between steps.
  static Chunk& of_thread() {
    static thread_local Chunk chunk;
    return chunk;
  }

  // Reserve space for rows of the table. Columns that pad rows to whole vectors are zero, and remain zero.
  void shape(const TableTarget& target) {
    target_ = &target;
    uniforms = target.uniforms;
    if (dim_ == target.dim) return;
    dim_ = target.dim;
    width_ = (dim_ + kLanes - 1) / kLanes * kLanes;
    cells_ = std::max(kChunkFloats, width_) + kLanes * kLanes;
    elements_.reserve(size_t(cells_) * kNumBuffers);
    std::fill_n(elements_.data(), size_t(cells_) * kNumBuffers, 0.0f);
  }

  // `rows` [n], n <= kMaxRows and n * dim <= kChunkFloats or n = 1. `gradients` [n] are addresses of `dim` floats.
  void take(const int64_t* rows, const float* const* gradients, int64_t n, uint32_t step) {
    rows_ = rows;
    gradients_ = gradients;
    n_ = n;
    if constexpr (sizeof(T) != sizeof(float)) draw(rows, n, step);
  }

  // Run body(at) for every vector of every row.
  template <typename Body>
  void each_element(Body body) {
    // Copy members, because the compiler assumes that storing a vector may change them.
    T* const weight = static_cast<T*>(target_->weight);
    float* const* const state = target_->state.data();
    float* const buffers = elements_.data();
    const uint16_t* const random = random_.data();
    const int64_t num_rows = n_, dim = dim_, width = width_, cells = cells_, whole = dim / kLanes * kLanes;
    for (int64_t k = 0; k < num_rows; ++k) {
      const int64_t row = rows_[k] * dim;
      const float *gradient = gradients_[k], *values = row_values_[0] + k;
      const auto visit = [&]<bool kPart>(int64_t c, int lanes) {
        const int64_t at = k * width + c;
        body(Place<kPart>{weight + row + c, state, row + c, gradient + c, buffers + at, random + at, cells, values, lanes});
      };
      for (int64_t c = 0; c < whole; c += kLanes) visit.template operator()<false>(c, kLanes);
      if (whole < dim) visit.template operator()<true>(whole, int(dim - whole));
    }
  }
  // Run body(k) for rows k..k+15.
  template <typename Body>
  void each_row(Body body) {
    for (int64_t k = 0; k < n_; k += kLanes) body(k);
  }
  Vec row(int slot, int64_t k) const { return load(row_values_[slot] + k); }
  void put_row(int slot, int64_t k, Vec v) { store(row_values_[slot] + k, v); }
  void sum(int summands, int slot) {
    const int64_t blocks = width_ / kLanes;
    sums_.reserve(size_t(n_ * blocks + kLanes));
    sum_rows(buffer(summands), n_, blocks, sums_.data(), row_values_[slot]);
  }
  void load_row_state(int index, int slot) {
    const float* state = target_->state[size_t(index)];
    for (int64_t k = 0; k < n_; ++k) row_values_[slot][k] = state[rows_[k]];
  }
  void store_row_state(int index, int slot) {
    float* state = target_->state[size_t(index)];
    for (int64_t k = 0; k < n_; ++k) state[rows_[k]] = row_values_[slot][k];
  }
  // Round `values` [n, width] to 16 bits and write them to their rows.
  void round(const float* values, const int64_t* rows, int64_t n, uint32_t step) {
    draw(rows, n, step);
    T* weight = static_cast<T*>(target_->weight);
    for (int64_t k = 0; k < n; ++k)
      round_row(values + k * width_, random_.data() + k * width_, weight + rows[k] * dim_, dim_);
  }

 private:
  static constexpr int kNumBuffers = 2 * kMaxBuffers;  // Summands and kept values.

  // Sixteen columns of a row, or its last columns if kPart.
  template <bool kPart>
  struct Place {
    T* at;  // Position in the table.
    float* const* states;
    int64_t cell;  // Position in states of the table's shape.
    const float* upstream;
    float* buffers;          // Position in the first buffer.
    const uint16_t* random;  // Random bits, for rows of 16 bits.
    int64_t cells;           // Distance between buffers.
    const float* row_values;
    int lanes;

    template <typename S>
    Vec read(const S* p) const {
      if constexpr (kPart) return load(p, lanes);
      else return load(p);
    }
    void write(float* p, Vec v) const {
      if constexpr (kPart) store(p, v, lanes);
      else store(p, v);
    }
    Vec gradient() const { return read(upstream); }
    Vec weight() const { return read(at); }
    Vec state(int index) const { return read(states[index] + cell); }
    Vec row(int slot) const { return broadcast(row_values[slot * kMaxRows]); }
    Vec kept(int slot) const { return load(buffers + (kMaxBuffers + slot) * cells); }
    void add(int summands, Vec v) const { write(buffers + summands * cells, v); }
    void keep(int slot, Vec v) const { store(buffers + (kMaxBuffers + slot) * cells, v); }
    void put_state(int index, Vec v) const { write(states[index] + cell, v); }
    void put_weight(Vec v) const {
      if constexpr (sizeof(T) == sizeof(float)) write(at, v);
      else if constexpr (kPart) round_part(v, random, at, lanes);
      else round_vector(v, random, at);
    }
  };

  float* buffer(int index) const { return elements_.data() + index * cells_; }
  void draw(const int64_t* rows, int64_t n, uint32_t step) {
    random_.reserve(size_t(n * width_));
    int64_t ids[kMaxRows];
    for (int64_t k = 0; k < n; ++k) ids[k] = target_->row(rows[k]);
    random_16_bits(target_->key, step, ids, n, target_->first_row, target_->first_column, width_, random_.data());
  }

  const TableTarget* target_ = nullptr;
  const int64_t* rows_ = nullptr;
  const float* const* gradients_ = nullptr;
  int64_t n_ = 0;
  int64_t dim_ = 0, width_ = 0, cells_ = 0;
  Buffer<float> elements_, sums_;
  Buffer<uint16_t> random_;
  float row_values_[2 * kMaxBuffers][kMaxRows] = {};
};

}  // namespace meseta

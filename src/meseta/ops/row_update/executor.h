// Runs the program of a row optimizer (meseta/ops/row_program) over chunks of rows that fit into the first-level cache, so
// that decoding an instruction is paid once per chunk. Programs of programs.h run as compiled code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/row_update/programs.h"
#include "ops/row_lines.h"
#include "ops/simd.h"

namespace meseta {

enum Op : int32_t {
  kAdd, kSub, kMul, kDiv, kMax, kMin, kGreater, kSqrt, kAbs, kSign, kNeg, kWhere, kSum,
  kLoadWeight, kLoadState, kLoadStat, kStoreWeight, kStoreState, kStoreStat
};

struct Instruction {
  int32_t op, dst, a, b, c;
};

constexpr int32_t kFirstRow = 64, kFirstUniform = 128, kUnused = -1;

struct RowProgram {
  std::vector<Instruction> code;
  std::vector<bool> state_is_row;
  int num_uniforms, num_stats, num_sums;
  int num_element_registers = 1, num_row_registers = 0;

  // Check all operands of the instructions here, so that running needs no checks.
  RowProgram(const int32_t* words, int64_t num_instructions, std::vector<bool> state_kinds, int uniforms, int stats,
          int sums)
      : state_is_row(std::move(state_kinds)), num_uniforms(uniforms), num_stats(stats), num_sums(sums) {
    for (int64_t i = 0; i < num_instructions; ++i) {
      const int32_t* w = words + 5 * i;
      code.push_back({w[0], w[1], w[2], w[3], w[4]});
      check(code.back(), i);
    }
  }
  // Whether the program consists of these instructions, five words each.
  bool is(const std::vector<int32_t>& words) const {
    return words.size() == 5 * code.size() && std::memcmp(words.data(), code.data(), 4 * words.size()) == 0;
  }

 private:
  void check(const Instruction& x, int64_t i) {
    const auto need = [&](bool fine, const char* what) {
      if (!fine) throw std::invalid_argument("program, instruction " + std::to_string(i) + ": " + what);
    };
    const auto operand = [&](int32_t r) {
      need(r >= 0 && r < kFirstUniform + num_uniforms, "an operand is neither a register nor a uniform");
      note(r);
    };
    const auto target = [&](int32_t r) {
      need(r >= 0 && r < kFirstUniform, "the result is not a register");
      note(r);
    };
    const auto row = [&](int32_t r) { need(r >= kFirstRow, "a row register is needed"); };
    const auto state = [&](int32_t s) { need(s >= 0 && s < int32_t(state_is_row.size()), "the state does not exist"); };
    const auto stat = [&](int32_t s) { need(s >= 0 && s < num_stats, "the statistic does not exist"); };
    switch (x.op) {
      case kWhere: operand(x.c); [[fallthrough]];
      case kAdd: case kSub: case kMul: case kDiv: case kMax: case kMin: case kGreater: operand(x.b); [[fallthrough]];
      case kSqrt: case kAbs: case kSign: case kNeg:
        operand(x.a);
        target(x.dst);
        if (x.dst < kFirstRow)
          need(x.op == kWhere || x.a < kFirstRow || (x.op <= kGreater && x.b < kFirstRow),
               "an element register needs an element operand");
        else
          need(x.a >= kFirstRow && (x.b == kUnused || x.b >= kFirstRow) && (x.c == kUnused || x.c >= kFirstRow),
               "a row register cannot hold elements");
        break;
      case kSum:
        operand(x.a);
        need(x.a < kFirstRow, "only elements can be summed");
        target(x.dst);
        row(x.dst);
        break;
      case kLoadWeight:
        target(x.dst);
        need(x.dst < kFirstRow, "rows need an element register");
        break;
      case kLoadState:
        state(x.a);
        target(x.dst);
        need((x.dst >= kFirstRow) == state_is_row[size_t(x.a)], "the kind of register does not match the state");
        break;
      case kLoadStat: stat(x.a); target(x.dst); row(x.dst); break;
      case kStoreWeight: operand(x.a); break;
      case kStoreState:
        operand(x.a);
        state(x.b);
        need(x.a >= kFirstRow || !state_is_row[size_t(x.b)], "a state per row cannot hold elements");
        break;
      case kStoreStat:
        operand(x.a);
        need(x.a < kFirstRow && x.b >= 0 && x.b < num_sums, "only elements can be summed, each into a valid statistic");
        break;
      default: need(false, "unknown operation");
    }
  }
  void note(int32_t r) {
    if (r < kFirstRow) num_element_registers = std::max(num_element_registers, r + 1);
    else if (r < kFirstUniform) num_row_registers = std::max(num_row_registers, r - kFirstRow + 1);
  }
};

template <typename T>
class Executor {
 public:
  explicit Executor(const RowProgram& program) : program_(program) {
    for (const FusedProgram<T>& known : fused_programs<T>())
      if (program.is(known.instructions)) fused_ = known.run;
  }

  // Reserve space for rows of `dim` columns, padded to whole vectors.
  void shape(const TableTarget& target) {
    target_ = &target;
    chunk_.shape(target);
    if (dim_ == target.dim) return;
    dim_ = target.dim;
    width_ = (target.dim + kLanes - 1) / kLanes * kLanes;
    capacity_ = std::clamp<int64_t>(kChunkFloats / width_, 1, kMaxRows);
    sums_.reserve(size_t(capacity_ * (width_ + kLanes)));
    if (fused_ != nullptr) return;
    // Vectors of a sum are read sixteen at a time.
    const size_t cells = size_t(program_.num_element_registers * capacity_ * width_ + kLanes * kLanes);
    elements_.reserve(cells);
    rows_.reserve(size_t(program_.num_row_registers) * kMaxRows);
    spread_.reserve(size_t(capacity_ * width_));
    std::fill_n(elements_.data(), cells, 0.0f);
    std::fill_n(rows_.data(), size_t(program_.num_row_registers) * kMaxRows, 0.0f);
  }
  int64_t capacity() const { return capacity_; }
  int64_t width() const { return width_; }
  // Space for the gradients of a chunk, for callers that sum them; [capacity, width].
  float* sums() { return sums_.data(); }

  // Prefetch rows that will be updated soon, and their states.
  void prefetch_rows(const int64_t* rows, int64_t n) const {
    fetch_lines(static_cast<const T*>(target_->weight), dim_, rows, n);
    for (size_t s = 0; s < program_.state_is_row.size(); ++s)
      fetch_lines(target_->state[s], program_.state_is_row[s] ? 1 : dim_, rows, n);
  }

  // Run the program for unique `rows` [n], n <= capacity, with the address of each gradient. `stats`
  // [num_stats][stats_stride] of these rows and `summands` [num_stats][summands_stride][blocks] may be null if the program
  // does not use them.
  void run(const int64_t* rows, const float* const* gradients, int64_t n, uint32_t step, const float* stats = nullptr,
           int64_t stats_stride = 0, float* summands = nullptr, int64_t summands_stride = 0) {
    if (fused_ != nullptr) {
      chunk_.take(rows, gradients, n, step);
      return fused_(chunk_);
    }
    for (int64_t k = 0; k < n; ++k) copy_row(gradients[k], dim_, element(0) + k * width_);
    for (const Instruction& x : program_.code) {
      switch (x.op) {
        case kSum: sum(x, n); break;
        case kLoadWeight: load_weight(element(x.dst), rows, n); break;
        case kLoadState: load_state(x, rows, n); break;
        case kLoadStat: std::copy_n(stats + x.a * stats_stride, n, row(x.dst)); break;
        case kStoreWeight: store_weight(x.a, rows, n, step); break;
        case kStoreState: store_state(x, rows, n); break;
        case kStoreStat: store_stat(x, n, summands + x.b * summands_stride * (width_ / kLanes)); break;
        case kSqrt: unary(x, n, [](Vec a) { return meseta::sqrt(a); }); break;
        case kAbs: unary(x, n, [](Vec a) { return meseta::abs(a); }); break;
        case kSign: unary(x, n, [](Vec a) { return meseta::sign(a); }); break;
        case kNeg: unary(x, n, [](Vec a) { return negate(a); }); break;
        case kWhere: ternary(x, n); break;
        case kAdd: binary(x, n, [](Vec a, Vec b) { return a + b; }); break;
        case kSub: binary(x, n, [](Vec a, Vec b) { return a - b; }); break;
        case kMul: binary(x, n, [](Vec a, Vec b) { return a * b; }); break;
        case kDiv: binary(x, n, [](Vec a, Vec b) { return a / b; }); break;
        case kMax: binary(x, n, [](Vec a, Vec b) { return maximum(a, b); }); break;
        case kMin: binary(x, n, [](Vec a, Vec b) { return minimum(a, b); }); break;
        default: binary(x, n, [](Vec a, Vec b) { return greater(a, b); });  // kGreater.
      }
    }
  }

 private:
  template <typename S>
  static void fetch_lines(const S* from, int64_t width, const int64_t* rows, int64_t n) {
    const RowLines lines(from, width * int64_t(sizeof(S)));
    for (int64_t k = 0; k < n; ++k) lines.fetch(rows[k]);
  }

  float* element(int32_t r) { return elements_.data() + r * capacity_ * width_; }
  float* row(int32_t r) { return rows_.data() + (r - kFirstRow) * kMaxRows; }
  float uniform(int32_t r) const { return target_->uniforms[r - kFirstUniform]; }

  // Process elements in memory order. A row operand or a uniform is broadcast over its row.
  template <typename F>
  void unary(const Instruction& x, int64_t n, F f) {
    if (x.dst >= kFirstRow) {
      float* out = row(x.dst);
      rowwise(x.a, [&](auto a) {
        for (int64_t k = 0; k < n; k += kLanes) store(out + k, f(a(k)));
      });
    } else {
      float* out = element(x.dst);
      const float* a = element(x.a);
      const int64_t count = n * width_;
      for (int64_t i = 0; i < count; i += kLanes) store(out + i, f(load(a + i)));
    }
  }

  template <typename F>
  void binary(const Instruction& x, int64_t n, F f) {
    if (x.dst >= kFirstRow) {
      float* out = row(x.dst);
      rowwise(x.a, [&](auto a) {
        rowwise(x.b, [&](auto b) {
          for (int64_t k = 0; k < n; k += kLanes) store(out + k, f(a(k), b(k)));
        });
      });
      return;
    }
    float* out = element(x.dst);
    if (x.a >= kFirstRow) {
      const float* b = element(x.b);
      each_row(x.a, n, [&](int64_t i, Vec a) { store(out + i, f(a, load(b + i))); });
    } else if (x.b >= kFirstRow) {
      const float* a = element(x.a);
      each_row(x.b, n, [&](int64_t i, Vec b) { store(out + i, f(load(a + i), b)); });
    } else {
      const float *a = element(x.a), *b = element(x.b);
      const int64_t count = n * width_;
      for (int64_t i = 0; i < count; i += kLanes) store(out + i, f(load(a + i), load(b + i)));
    }
  }

  void ternary(const Instruction& x, int64_t n) {
    if (x.dst >= kFirstRow) {
      float* out = row(x.dst);
      for (int64_t k = 0; k < n; k += kLanes)
        store(out + k, where_positive(row_value(x.a, k), row_value(x.b, k), row_value(x.c, k)));
      return;
    }
    float* out = element(x.dst);
    for (int64_t k = 0; k < n; ++k)
      for (int64_t i = k * width_; i < (k + 1) * width_; i += kLanes)
        store(out + i, where_positive(value(x.a, k, i), value(x.b, k, i), value(x.c, k, i)));
  }

  // Run body(i, v) for every vector i of every row. v has the row's value of register or uniform `r` in all lanes.
  // Members are copied, because the compiler assumes that storing a vector may change them.
  template <typename Body>
  void each_row(int32_t r, int64_t n, Body body) {
    const int64_t width = width_;
    if (r >= kFirstUniform) {
      const Vec v = broadcast(uniform(r));
      for (int64_t i = 0; i < n * width; i += kLanes) body(i, v);
      return;
    }
    const float* values = row(r);
    for (int64_t k = 0, i = 0; k < n; ++k) {
      const Vec v = broadcast(values[k]);
      for (const int64_t end = i + width; i < end; i += kLanes) body(i, v);
    }
  }

  // Run use(get), where get(k) returns the values of rows k..k+15 of a row register or uniform.
  template <typename Use>
  void rowwise(int32_t r, Use use) {
    if (r >= kFirstUniform) {
      const Vec v = broadcast(uniform(r));
      use([v](int64_t) { return v; });
    } else {
      const float* p = row(r);
      use([p](int64_t k) { return load(p + k); });
    }
  }
  Vec row_value(int32_t r, int64_t k) { return r >= kFirstUniform ? broadcast(uniform(r)) : load(row(r) + k); }
  Vec value(int32_t r, int64_t k, int64_t i) {
    if (r >= kFirstUniform) return broadcast(uniform(r));
    return r >= kFirstRow ? broadcast(row(r)[k]) : load(element(r) + i);
  }

  // Return the sum of the lanes of block `j` of a row, without the padding of the last block.
  float block_sum(const float* values, int64_t j) const {
    const int64_t left = target_->dim - j * kLanes;
    return sum_lanes(left >= kLanes ? load(values + j * kLanes) : load(values + j * kLanes, int(left)));
  }

  void sum(const Instruction& x, int64_t n) {
    float* a = element(x.a);
    const int64_t whole = dim_ / kLanes * kLanes, rest = dim_ - whole;
    for (int64_t k = 0; rest > 0 && k < n; ++k)  // The padding of the last block is undefined.
      store(a + k * width_ + whole, load(a + k * width_ + whole, int(rest)));
    sum_rows(a, n, width_ / kLanes, spread_.data(), row(x.dst));
  }

  void store_stat(const Instruction& x, int64_t n, float* out) {
    const int64_t blocks = width_ / kLanes;
    for (int64_t k = 0; k < n; ++k)
      for (int64_t j = 0; j < blocks; ++j) out[k * blocks + j] = block_sum(element(x.a) + k * width_, j);
  }

  template <typename S>
  void load_rows(float* out, const S* from, const int64_t* rows, int64_t n) const {
    const int64_t dim = target_->dim, whole = dim / kLanes * kLanes, width = width_;
    for (int64_t k = 0; k < n; ++k, out += width) {
      const S* p = from + rows[k] * dim;
      for (int64_t c = 0; c < whole; c += kLanes) store(out + c, load(p + c));
      if (whole < dim) store(out + whole, load(p + whole, int(dim - whole)));
    }
  }
  void store_rows(float* to, const float* values, const int64_t* rows, int64_t n) const {
    const int64_t dim = target_->dim, whole = dim / kLanes * kLanes, width = width_;
    for (int64_t k = 0; k < n; ++k, values += width) {
      float* p = to + rows[k] * dim;
      for (int64_t c = 0; c < whole; c += kLanes) store(p + c, load(values + c));
      if (whole < dim) store(p + whole, load(values + whole), int(dim - whole));
    }
  }

  void load_weight(float* out, const int64_t* rows, int64_t n) const {
    load_rows(out, static_cast<const T*>(target_->weight), rows, n);
  }
  void load_state(const Instruction& x, const int64_t* rows, int64_t n) {
    const float* state = target_->state[size_t(x.a)];
    if (x.dst < kFirstRow) return load_rows(element(x.dst), state, rows, n);
    float* out = row(x.dst);
    for (int64_t k = 0; k < n; ++k) out[k] = state[rows[k]];
  }

  // Return the elements of any operand. A value per row is broadcast.
  const float* spread(int32_t r, int64_t n) {
    if (r < kFirstRow) return element(r);
    each_row(r, n, [&](int64_t i, Vec v) { store(spread_.data() + i, v); });
    return spread_.data();
  }

  void store_weight(int32_t r, const int64_t* rows, int64_t n, uint32_t step) {
    const float* values = spread(r, n);
    if constexpr (sizeof(T) == sizeof(float)) store_rows(static_cast<float*>(target_->weight), values, rows, n);
    else chunk_.round(values, rows, n, step);
  }
  void store_state(const Instruction& x, const int64_t* rows, int64_t n) {
    float* state = target_->state[size_t(x.b)];
    if (!program_.state_is_row[size_t(x.b)]) return store_rows(state, spread(x.a, n), rows, n);
    const float* values = x.a >= kFirstUniform ? nullptr : row(x.a);
    for (int64_t k = 0; k < n; ++k) state[rows[k]] = values == nullptr ? uniform(x.a) : values[k];
  }

  const RowProgram& program_;
  const TableTarget* target_ = nullptr;
  int64_t dim_ = 0, width_ = 0, capacity_ = 0;
  void (*fused_)(Chunk<T>&) = nullptr;
  Chunk<T>& chunk_ = Chunk<T>::of_thread();
  Buffer<float> elements_, rows_, spread_, sums_;
};

}  // namespace meseta

// Location of each row, 4 bytes per row, in chunks that snapshots share until they are written to.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace meseta::row_file {

constexpr uint32_t kUnwritten = ~uint32_t{0};
constexpr int64_t kChunkRows = 4096;

struct IndexChunk {
  explicit IndexChunk(std::atomic<int64_t>& chunks) : count(chunks) {
    std::fill_n(slots, kChunkRows, kUnwritten);
    ++count;
  }
  IndexChunk(const IndexChunk& other) : count(other.count) {
    std::copy_n(other.slots, kChunkRows, slots);
    ++count;
  }
  ~IndexChunk() { --count; }
  uint32_t slots[kChunkRows];
  std::atomic<int64_t>& count;
};

// Not thread-safe. Callers hold the lock of the file.
class Index {
 public:
  explicit Index(int64_t rows) : chunks_(size_t((rows + kChunkRows - 1) / kChunkRows)) {}

  uint32_t operator[](int64_t row) const {
    const IndexChunk* chunk = chunks_[size_t(row / kChunkRows)].get();
    return chunk == nullptr ? kUnwritten : chunk->slots[row % kChunkRows];
  }

  void prefetch(int64_t row) const {
    const IndexChunk* chunk = chunks_[size_t(row / kChunkRows)].get();
    if (chunk != nullptr) __builtin_prefetch(chunk->slots + row % kChunkRows);
  }

  // Set the location of a row. Returns the previous one.
  uint32_t move(int64_t row, uint32_t slot, std::atomic<int64_t>& count) {
    std::shared_ptr<IndexChunk>& chunk = chunks_[size_t(row / kChunkRows)];
    if (chunk == nullptr)
      chunk = std::make_shared<IndexChunk>(count);
    else if (chunk.use_count() > 1)
      chunk = std::make_shared<IndexChunk>(*chunk);
    return std::exchange(chunk->slots[row % kChunkRows], slot);
  }

  void clear() { chunks_.clear(); }
  int64_t num_bytes() const { return int64_t(chunks_.capacity() * sizeof(chunks_[0])); }

 private:
  std::vector<std::shared_ptr<IndexChunk>> chunks_;
};

// Memory of a chunk, including its reference counts.
constexpr int64_t kChunkBytes = sizeof(IndexChunk) + 2 * sizeof(void*);

}  // namespace meseta::row_file

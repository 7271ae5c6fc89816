// Map from 64-bit keys to slots. It consists of parts, which are divided between threads. See part.h for their layout.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "ops/slot_map/part.h"
#include "ops/parallel.h"
#include "ops/scratch.h"

namespace meseta {

constexpr int64_t kSlotMapChunk = 4096;  // Minimum number of keys per additional thread.
constexpr int64_t kSlotMapBurst = 32;    // Number of keys whose places are prefetched at a time.

// The salt makes words independent of keys that are hashed to rows or ranks by splitmix64 itself.
constexpr uint64_t kSlotMapSalt = 0x6D65736574612131u;
inline uint64_t hash_key(int64_t key) { return splitmix64(uint64_t(key) ^ kSlotMapSalt); }
inline int64_t unhash_key(uint64_t word) { return int64_t(inverse_splitmix64(word) ^ kSlotMapSalt); }

// Thread-safe. Lookups run concurrently.
class SlotMap {
 public:
  virtual ~SlotMap() = default;
  virtual void find(const int64_t* keys, int64_t count, int64_t* slots, int num_threads) const = 0;
  virtual int64_t insert(const int64_t* keys, int64_t count, const int64_t* slots, int num_threads) = 0;
  virtual void remove(const int64_t* keys, int64_t count, int64_t* slots, int num_threads) = 0;
  virtual int64_t items(int64_t* keys, int64_t* slots, int64_t room) const = 0;
  virtual int64_t size() const = 0;
  virtual size_t num_bytes() const = 0;
};

template <typename Value>
class TypedSlotMap final : public SlotMap {
 public:
  // Each part has space for an equal share of `capacity` plus six standard deviations.
  explicit TypedSlotMap(int64_t capacity) {
    const uint64_t shares = uint64_t(capacity) / 1024;
    bits_ = shares < 2 ? 0 : std::min(int(std::bit_width(shares)) - 1, kMaxPartBits);
    parts_.resize(size_t{1} << bits_);
    const double share = double(capacity) / double(parts_.size());
    const int64_t most = bits_ == 0 ? capacity : int64_t(std::ceil(share + 6 * std::sqrt(share)));
    const int64_t homes = SlotMapPart<Value>::homes_for(most);
    const size_t bytes = SlotMapPart<Value>::num_bytes_for(homes);
    pages_ = Pages(bytes * parts_.size());
    for (size_t p = 0; p < parts_.size(); ++p) parts_[p].open(static_cast<char*>(pages_.data()) + p * bytes, homes, bits_);
  }

  void find(const int64_t* keys, int64_t count, int64_t* slots, int num_threads) const override {
    const std::shared_lock locked(mutex_);
    parallel_tasks(num_threads, (count + kSlotMapChunk - 1) / kSlotMapChunk, [&](int64_t piece) {
      const int64_t first = piece * kSlotMapChunk;
      for_each_word(keys + first, std::min(kSlotMapChunk, count - first), [&](int64_t i, uint64_t word) {
        slots[first + i] = find_part(word).find(word);
      });
    });
  }

  int64_t insert(const int64_t* keys, int64_t count, const int64_t* slots, int num_threads) override {
    const std::unique_lock locked(mutex_);
    const int64_t before = size_locked();
    for_each_in_part(keys, count, num_threads, [&](int64_t i, uint64_t word) { find_part(word).insert(word, slots[i]); });
    return size_locked() - before;
  }

  void remove(const int64_t* keys, int64_t count, int64_t* slots, int num_threads) override {
    const std::unique_lock locked(mutex_);
    for_each_in_part(keys, count, num_threads, [&](int64_t i, uint64_t word) { slots[i] = find_part(word).remove(word); });
  }

  int64_t items(int64_t* keys, int64_t* slots, int64_t room) const override {
    const std::shared_lock locked(mutex_);
    int64_t at = 0;
    for (const SlotMapPart<Value>& part : parts_)
      part.each([&](uint64_t word, int64_t slot) {
        if (at < room) keys[at] = unhash_key(word), slots[at] = slot;
        ++at;
      });
    return at;
  }

  int64_t size() const override {
    const std::shared_lock locked(mutex_);
    return size_locked();
  }

  size_t num_bytes() const override {
    const std::shared_lock locked(mutex_);
    size_t bytes = pages_.bytes() + sizeof(*this) + parts_.size() * sizeof(SlotMapPart<Value>);
    for (const SlotMapPart<Value>& part : parts_) bytes += part.grown_bytes();
    return bytes;
  }

 private:
  static constexpr int kMaxPartBits = 6;

  const SlotMapPart<Value>& find_part(uint64_t word) const { return parts_[bits_ == 0 ? 0 : word >> (64 - bits_)]; }
  SlotMapPart<Value>& find_part(uint64_t word) { return parts_[bits_ == 0 ? 0 : word >> (64 - bits_)]; }

  int64_t size_locked() const {
    int64_t count = 0;
    for (const SlotMapPart<Value>& part : parts_) count += part.count();
    return count;
  }

  // Run body(i, word) for the word of each key, in order. The places of the next keys are prefetched.
  template <typename Body>
  void for_each_word(const int64_t* keys, int64_t count, const Body& body) const {
    uint64_t words[2][kSlotMapBurst];
    const auto fetch = [&](int64_t first) {
      uint64_t* const to = words[first / kSlotMapBurst % 2];
      for (int64_t i = 0; i < std::min(kSlotMapBurst, count - first); ++i) {
        to[i] = hash_key(keys[first + i]);
        find_part(to[i]).fetch(to[i]);
      }
    };
    fetch(0);
    for (int64_t first = 0; first < count; first += kSlotMapBurst) {
      fetch(first + kSlotMapBurst);
      for (int64_t i = 0; i < std::min(kSlotMapBurst, count - first); ++i) body(first + i, words[first / kSlotMapBurst % 2][i]);
    }
  }

  // As for_each_word, but in parallel. One thread handles all keys of a part in the order of the batch, so that the
  // result does not depend on threads.
  template <typename Body>
  void for_each_in_part(const int64_t* keys, int64_t count, int num_threads, const Body& body) {
    if (num_threads <= 1 || count < 2 * kSlotMapChunk || bits_ == 0) return for_each_word(keys, count, body);
    const int64_t pieces = std::min<int64_t>(num_threads, count / kSlotMapChunk);
    const auto border = [&](int64_t piece) { return count * piece / pieces; };
    std::vector<std::array<int64_t, (size_t{1} << kMaxPartBits)>> ends(static_cast<size_t>(pieces));
    parallel_tasks(num_threads, pieces, [&](int64_t piece) {
      auto& counts = ends[size_t(piece)];
      counts.fill(0);
      for (int64_t i = border(piece); i < border(piece + 1); ++i) ++counts[hash_key(keys[i]) >> (64 - bits_)];
    });
    std::vector<int64_t> starts{0};
    int64_t at = 0;
    for (size_t p = 0; p < parts_.size(); ++p) {
      for (auto& counts : ends) at += std::exchange(counts[p], at);
      starts.push_back(at);
    }
    int64_t* const order = scratch<int64_t, 0>(size_t(count));
    int64_t* const dealt = scratch<int64_t, 1>(size_t(count));
    parallel_tasks(num_threads, pieces, [&](int64_t piece) {
      auto& next = ends[size_t(piece)];
      for (int64_t i = border(piece); i < border(piece + 1); ++i) {
        const int64_t to = next[hash_key(keys[i]) >> (64 - bits_)]++;
        order[to] = i;
        dealt[to] = keys[i];
      }
    });
    parallel_tasks(num_threads, int64_t(parts_.size()), [&](int64_t p) {
      const int64_t first = starts[size_t(p)];
      for_each_word(dealt + first, starts[size_t(p) + 1] - first,
                [&](int64_t i, uint64_t word) { body(order[first + i], word); });
    });
  }

  mutable std::shared_mutex mutex_;
  Pages pages_;
  int bits_ = 0;
  std::vector<SlotMapPart<Value>> parts_;
};

}  // namespace meseta

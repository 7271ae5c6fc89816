// Hash table with linear probing and ordered entries (Amble and Knuth, "Ordered hash tables", The Computer Journal 1974).
//
// Words decrease from the first place to the last. Each is at its home or after it, with no empty place in between:
//
//   home     0     1     2     3     4     5
//   word  |  -  | 9.1 | 9.0 | 8.7 |  -  | 4.2 |       homes of 9.1, 9.0 and 8.7 are 1, 1 and 2
//
// A search for a missing word therefore ends at the first smaller one, as early as for an existing word. The places depend
// only on the set of words, not on the order of operations. A removal moves later words up and leaves no tombstone.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "ops/mix.h"
#include "ops/simd.h"

namespace meseta {

// Zeroed pages, which take memory when they are first written. They are huge pages on Linux if possible.
class Pages {
 public:
  explicit Pages(size_t bytes = 0) : bytes_(bytes) {
    if (bytes == 0) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
#if defined(__linux__)
    if (bytes >= kLarge) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pages() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kLarge = size_t{2} << 20;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

#pragma pack(push, 4)
// Entry of the table. `value` is the slot + 1. In an empty entry, `value` and `word` are 0.
template <typename Value>
struct SlotMapEntry {
  uint64_t word;
  Value value;
};
#pragma pack(pop)

// Part of a slot map, with the words that have the same leading bits.
template <typename Value>
class SlotMapPart {
 public:
  using Place = SlotMapEntry<Value>;
  static constexpr int64_t kTail = 64;  // Places after the last home. One in e^29 tables needs more.

  // Return the number of homes for `count` words at the maximum load.
  static int64_t homes_for(int64_t count) { return std::max<int64_t>(8, (count * 5 + 3) / 4); }
  static size_t num_bytes_for(int64_t homes, int64_t tail = kTail) { return size_t(homes + tail + 1) * sizeof(Place); }

  // `places` must be zeroed and have num_bytes_for(homes, tail). `skipped` is the number of leading bits that all words
  // share.
  void open(void* places, int64_t homes, int skipped, int64_t tail = kTail) {
    places_ = static_cast<Place*>(places);
    homes_ = uint64_t(homes);
    last_ = uint64_t(homes + tail);
    skipped_ = skipped;
    limit_ = homes * 4 / 5;
    count_ = 0;
  }
  int64_t count() const { return count_; }
  size_t grown_bytes() const { return own_.bytes(); }

  void fetch(uint64_t word) const { prefetch(places_ + home(word)); }

  // Return the slot of a word, or -1.
  int64_t find(uint64_t word) const {
    const Place& place = places_[search(word)];
    return place.word == word ? int64_t(place.value) - 1 : -1;
  }

  // Insert a word, or replace its slot. Returns whether the word is new.
  bool insert(uint64_t word, int64_t slot) {
    const Place entry{word, Value(slot + 1)};
    uint64_t at = search(word);
    if (places_[at].value != 0 && places_[at].word == word) {
      places_[at] = entry;
      return false;
    }
    for (; count_ >= limit_; at = search(word)) grow(homes_ + std::max<uint64_t>(homes_ / 2, 8), last_ - homes_);
    for (; !shift(at); at = search(word)) grow(homes_, 2 * (last_ - homes_));
    places_[at] = entry;
    ++count_;
    return true;
  }

  // Remove a word. Returns its slot, or -1.
  int64_t remove(uint64_t word) {
    uint64_t at = search(word);
    if (places_[at].value == 0 || places_[at].word != word) return -1;
    const int64_t slot = int64_t(places_[at].value) - 1;
    for (; places_[at + 1].value != 0 && home(places_[at + 1].word) <= at; ++at) places_[at] = places_[at + 1];
    places_[at] = Place{};
    --count_;
    return slot;
  }

  // Run body(word, slot) for all words, in descending order.
  template <typename Body>
  void each(Body body) const {
    for (uint64_t at = 0; at < last_; ++at)
      if (places_[at].value != 0) body(uint64_t(places_[at].word), int64_t(places_[at].value) - 1);
  }

 private:
  // Larger words have smaller homes.
  uint64_t home(uint64_t word) const { return reduce(~word << skipped_, homes_); }

  // Return the place of a word, or the place where it would be inserted. Empty places have the smallest word, and place
  // `last_` is always empty.
  uint64_t search(uint64_t word) const {
    uint64_t at = home(word);
    while (places_[at].word > word) ++at;
    return at;
  }

  // Shift entries to free place `at`. Returns false, with nothing moved, if place `last_` would not remain empty.
  bool shift(uint64_t at) {
    uint64_t end = at;
    while (places_[end].value != 0) ++end;
    if (end == last_) return false;
    std::copy_backward(places_ + at, places_ + end, places_ + end + 1);
    return true;
  }

  void grow(uint64_t homes, uint64_t tail) {
    SlotMapPart larger;
    while (!larger.take(*this, homes, tail)) tail *= 2;
    *this = std::move(larger);
  }

  // Copy the entries of `smaller`. Returns false if they do not fit.
  bool take(const SlotMapPart& smaller, uint64_t homes, uint64_t tail) {
    own_ = Pages(num_bytes_for(int64_t(homes), int64_t(tail)));
    open(own_.data(), int64_t(homes), smaller.skipped_, int64_t(tail));
    count_ = smaller.count_;
    uint64_t next = 0;
    smaller.each([&](uint64_t word, int64_t slot) {
      next = std::max(home(word), next);
      if (next < last_) places_[next] = {word, Value(slot + 1)};
      ++next;
    });
    return next <= last_;
  }

  Pages own_;  // Memory of a part that has grown.
  Place* places_ = nullptr;
  uint64_t homes_ = 0, last_ = 0;
  int skipped_ = 0;
  int64_t limit_ = 0, count_ = 0;
};

}  // namespace meseta

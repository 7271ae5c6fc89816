// Large blocks on 2 MB pages. Freed blocks are kept for the next request. New pages cost the kernel a fault and clearing
// each, which for the outputs of a step takes longer than computing them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nb = nanobind;

namespace {

constexpr size_t kPage = size_t{2} << 20;

struct Block {
  void* data;
  size_t bytes;
  bool keep;
};

class Pool {
 public:
  Block take(size_t bytes, bool keep) {
    if (bytes > SIZE_MAX - kPage) throw std::bad_alloc();
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    if (keep) {
      const std::lock_guard<std::mutex> locked(mutex_);
      // Use the smallest free block, unless it is more than 1.5 times as large as requested.
      const auto found = free_.lower_bound(rounded);
      if (found != free_.end() && found->first <= rounded + rounded / 2) {
        const Block block{found->second.data, found->first, true};
        idle_bytes_ -= block.bytes;
        free_.erase(found);
        use(block.bytes);
        return block;
      }
    }
    void* data = std::aligned_alloc(kPage, rounded);
    if (data == nullptr) throw std::bad_alloc();
    if (keep) {
      const std::lock_guard<std::mutex> locked(mutex_);
      use(rounded);
    }
#if defined(__linux__)
    madvise(data, rounded, MADV_HUGEPAGE);
#endif
    return {data, rounded, keep};
  }

  void give(const Block& block) {
    if (block.keep) {
      const std::lock_guard<std::mutex> locked(mutex_);
      used_ -= block.bytes;
      free_.emplace(block.bytes, Idle{block.data, ++time_});
      idle_bytes_ += block.bytes;
      // Idle memory must not exceed the peak of memory in use. The longest idle block is freed first.
      while (idle_bytes_ > peak_) {
        const auto oldest = std::min_element(free_.begin(), free_.end(), [](const auto& a, const auto& b) {
          return a.second.since < b.second.since;
        });
        idle_bytes_ -= oldest->first;
        std::free(oldest->second.data);
        free_.erase(oldest);
      }
    } else {
      std::free(block.data);
    }
  }

  // Free idle blocks. The peak of memory in use is measured from here on.
  void release_idle() {
    const std::lock_guard<std::mutex> locked(mutex_);
    for (const auto& [bytes, idle] : free_) std::free(idle.data);
    free_.clear();
    idle_bytes_ = 0;
    peak_ = used_;
  }

 private:
  void use(size_t bytes) {
    used_ += bytes;
    if (used_ > peak_) peak_ = used_;
  }

  std::mutex mutex_;
  struct Idle {
    void* data;
    uint64_t since;
  };
  std::multimap<size_t, Idle> free_;
  size_t used_ = 0, idle_bytes_ = 0, peak_ = 0;
  uint64_t time_ = 0;
};

Pool& pool() {
  static Pool* forever = new Pool;  // Never destroyed, because tensors may be freed when the interpreter exits.
  return *forever;
}

nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu> allocate(size_t bytes, bool keep) {
  auto* block = new Block(pool().take(bytes, keep));
  const nb::capsule owner(block, [](void* p) noexcept {
    auto* mine = static_cast<Block*>(p);
    pool().give(*mine);
    delete mine;
  });
  return {block->data, {bytes}, owner};
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("allocate", &allocate, nb::arg("bytes"), nb::arg("keep"));
  m.def("release_idle_memory", [] { pool().release_idle(); });
}

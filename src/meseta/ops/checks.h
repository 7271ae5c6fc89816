// Checks of sizes, offsets and ids, which come from users, before operators read them.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace meseta {

// Throw an error whose text is the concatenation of the arguments.
template <typename... Parts>
[[noreturn]] void throw_invalid_argument(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Position of the first invalid input. The smallest position wins, whichever thread reports first.
struct FirstError {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> at{kNone};
  void note(int64_t position) {
    int64_t seen = at.load();
    while (position < seen && !at.compare_exchange_weak(seen, position)) {
    }
  }
};

// Check that `bounds` [count] do not decrease and are in 0..limit.
inline void check_bounds(const char* name, const int64_t* bounds, int64_t count, int64_t limit) {
  bool good = count > 0 && bounds[0] >= 0 && bounds[count - 1] <= limit;
  for (int64_t i = 1; i < count; ++i) good &= bounds[i - 1] <= bounds[i];
  if (good) return;
  if (count <= 0) throw_invalid_argument(name, " is empty; pass at least one number");
  for (int64_t i = 0; i < count; ++i)
    if (bounds[i] < 0 || bounds[i] > limit || (i > 0 && bounds[i] < bounds[i - 1]))
      throw_invalid_argument(name, "[", i, "] is ", bounds[i], "; ", name, " must not decrease and must be in 0..", limit);
}

}  // namespace meseta

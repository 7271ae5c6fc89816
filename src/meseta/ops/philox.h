// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) and the bits of a table's cells.
#pragma once

#include <array>
#include <cstdint>

namespace meseta {

inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, uint64_t key) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{c[0]} * 0xD2511F53u;
    const uint64_t p1 = uint64_t{c[2]} * 0xCD9E8D57u;
    c = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1, uint32_t(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The words of cells (row, first_column) .. (row, first_column + count - 1): the counter is (low and high word of the
// row, column / 4, 0), and a cell takes word column % 4.
template <typename Word>
void random_words(uint64_t key, uint64_t row, uint64_t first_column, int64_t count, Word* out) {
  std::array<uint32_t, 4> words{};
  for (int64_t c = 0; c < count; ++c) {
    const uint64_t column = first_column + uint64_t(c);
    if (c == 0 || column % 4 == 0) words = philox({uint32_t(row), uint32_t(row >> 32), uint32_t(column / 4), 0u}, key);
    out[c] = Word(words[column % 4]);
  }
}

}  // namespace meseta

// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) for many counters in parallel.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace meseta {

// ---- One word of several counters

#if defined(__AVX512F__)
constexpr int kWide = 8, kWides = 4;  // Counters per vector, and number of vectors that fill the pipelines.
#elif defined(__AVX2__)
constexpr int kWide = 4, kWides = 4;
#else
constexpr int kWide = 2, kWides = 4;
#endif

// A word is the lower half of a lane, as multiplications need it. The upper half is undefined. The order of counters in
// lanes is such that two shuffles put the sixteen bytes of each counter into place.
typedef uint64_t Wide __attribute__((vector_size(8 * kWide)));
typedef int64_t SignedWide __attribute__((vector_size(8 * kWide)));

constexpr uint64_t kWord = 0xFFFFFFFFu;

inline Wide spread(uint64_t x) { return x - Wide{}; }
inline Wide high(Wide a) { return a >> 32; }

#if defined(__AVX512F__)

// Zeroing intrinsics with all lanes set: see simd.h.
inline Wide positions() { return Wide{0, 4, 1, 5, 2, 6, 3, 7}; }
inline Wide product(Wide a, Wide b) { return Wide(_mm512_maskz_mul_epu32(0xFF, __m512i(a), __m512i(b))); }
inline Wide exclusive_or(Wide a, Wide b, Wide c) {
  return Wide(_mm512_ternarylogic_epi64(__m512i(a), __m512i(b), __m512i(c), 0x96));
}
// Move lanes whose `group` has reached `groups` to the next row.
inline void wrap(Wide& group, Wide& row, Wide groups) {
  const __mmask8 past = _mm512_cmpge_epi64_mask(__m512i(group), __m512i(groups));
  group = Wide(_mm512_mask_sub_epi64(__m512i(group), past, __m512i(group), __m512i(groups)));
  row = Wide(_mm512_mask_add_epi64(__m512i(row), past, __m512i(row), _mm512_set1_epi64(1)));
}
// Return rows[at], at < kWide. Nothing is read after the `left` rows. Lanes that would read there are undefined.
inline Wide pick(const int64_t* rows, int64_t left, Wide at) {
  const int there = int(std::clamp<int64_t>(left, 0, kWide));
  const __m512i all = _mm512_maskz_loadu_epi64(__mmask8((1u << there) - 1), rows);
  return Wide(_mm512_maskz_permutexvar_epi64(0xFF, __m512i(at), all));
}
inline void store_counters(char* out, Wide a, Wide b, Wide c, Wide d) {
  const __m512i ab = _mm512_mask_shuffle_epi32(__m512i(a), 0xAAAA, __m512i(b), _MM_PERM_CCAA);
  const __m512i cd = _mm512_mask_shuffle_epi32(__m512i(c), 0xAAAA, __m512i(d), _MM_PERM_CCAA);
  _mm512_storeu_si512(out, _mm512_maskz_unpacklo_epi64(0xFF, ab, cd));
  _mm512_storeu_si512(out + 64, _mm512_maskz_unpackhi_epi64(0xFF, ab, cd));
}

#else

inline Wide exclusive_or(Wide a, Wide b, Wide c) { return a ^ (b ^ c); }
inline void wrap(Wide& group, Wide& row, Wide groups) {
  const Wide past = Wide(SignedWide(group) >= SignedWide(groups));  // All bits set, which is -1, or 0.
  group -= past & groups;
  row -= past;
}

#if defined(__AVX2__)

inline Wide positions() { return Wide{0, 2, 1, 3}; }
inline Wide product(Wide a, Wide b) { return Wide(_mm256_mul_epu32(__m256i(a), __m256i(b))); }
inline Wide pick(const int64_t* rows, int64_t left, Wide at) {
  const Wide there = Wide(SignedWide{0, 1, 2, 3} < SignedWide(spread(uint64_t(left))));
  const __m256i all = _mm256_maskload_epi64(reinterpret_cast<const long long*>(rows), __m256i(there));
  const Wide halves = (at << 1 | at << 33) + spread(uint64_t{1} << 32);  // Words 2 at and 2 at + 1.
  return Wide(_mm256_permutevar8x32_epi32(all, __m256i(halves)));
}
inline void store_counters(char* out, Wide a, Wide b, Wide c, Wide d) {
  const __m256i ab = _mm256_blend_epi32(__m256i(a), __m256i(b << 32), 0xAA);
  const __m256i cd = _mm256_blend_epi32(__m256i(c), __m256i(d << 32), 0xAA);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi64(ab, cd));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), _mm256_unpackhi_epi64(ab, cd));
}

#else

inline Wide positions() { return Wide{0, 1}; }
inline Wide product(Wide a, Wide b) {
#if defined(__SSE2__)
  return Wide(_mm_mul_epu32(__m128i(a), __m128i(b)));
#else
  return (a & kWord) * (b & kWord);
#endif
}
inline Wide pick(const int64_t* rows, int64_t left, Wide at) {
  const int64_t last = left - 1;
  if (last < 0) return Wide{};
  return Wide{uint64_t(rows[std::min(int64_t(at[0]), last)]), uint64_t(rows[std::min(int64_t(at[1]), last)])};
}
inline void store_counters(char* out, Wide a, Wide b, Wide c, Wide d) {
  const Wide ab = (a & kWord) | b << 32, cd = (c & kWord) | d << 32;
  const uint64_t words[4] = {ab[0], cd[0], ab[1], cd[1]};
  std::memcpy(out, words, sizeof(words));
}

#endif
#endif

// ---- All words

constexpr int kCounters = kWide * kWides;  // Counters in parallel: 32, 16 or 8.

inline void philox(Wide (&a)[kWides], Wide (&b)[kWides], Wide (&c)[kWides], Wide (&d)[kWides], uint64_t key) {
  const Wide first = spread(0xD2511F53u), second = spread(0xCD9E8D57u);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const Wide key0 = spread(k0), key1 = spread(k1);
    for (int i = 0; i < kWides; ++i) {
      const Wide p0 = product(a[i], first), p1 = product(c[i], second);
      a[i] = exclusive_or(high(p1), b[i], key0);
      b[i] = p1;
      c[i] = exclusive_or(high(p0), d[i], key1);
      d[i] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// Iterates over (row, group) in [num_rows, groups], kWide pairs at a time.
class Walk {
 public:
  Walk(const int64_t* rows, int64_t num_rows, int64_t groups)
      : rows_(rows), left_(num_rows), groups_(groups), rows_on_(kWide / groups), groups_on_(kWide % groups) {
    for (int64_t behind = groups; behind < kWide; behind += groups) wrap(groups_at_, rows_at_, spread(uint64_t(groups)));
  }
  Wide row() const { return pick(rows_, left_, rows_at_); }
  Wide group() const { return groups_at_; }
  void next() {
    groups_at_ = groups_at_ + spread(uint64_t(groups_on_));
    wrap(groups_at_, rows_at_, spread(uint64_t(groups_)));
    group_ += groups_on_;
    const int64_t wrapped = group_ >= groups_;
    group_ -= wrapped * groups_;
    rows_at_ = rows_at_ - spread(uint64_t(wrapped));
    rows_ += rows_on_ + wrapped;
    left_ -= rows_on_ + wrapped;
  }

 private:
  const int64_t* rows_;  // Rows from that of the first lane on.
  int64_t left_, groups_, rows_on_, groups_on_, group_ = 0;
  Wide groups_at_ = positions(), rows_at_ = spread(0);
};

// Parts of counters that do not depend on the row.
struct CounterRange {
  uint64_t key;
  uint64_t first_row;    // Added to every row.
  uint32_t first_group;  // Third word of the first counter of a row. Further counters of the row count up from it.
  uint32_t last;         // Fourth word.
};

// Write the four words of each counter (low and high word of the row, group, last) to `out` [num_rows, groups, 4].
inline void philox_words(const CounterRange& range, const int64_t* rows, int64_t num_rows, int64_t groups, void* out) {
  const int64_t count = num_rows * groups;
  Walk walk(rows, num_rows, groups);
  char* to = static_cast<char*>(out);
  for (int64_t at = 0; at < count; at += kCounters, to += kCounters * 16) {
    Wide a[kWides], b[kWides], c[kWides], d[kWides];
    for (int i = 0; i < kWides; ++i, walk.next()) {
      a[i] = walk.row() + spread(range.first_row);
      b[i] = high(a[i]);
      c[i] = walk.group() + spread(range.first_group);
      d[i] = spread(range.last);
    }
    philox(a, b, c, d, range.key);
    char part[kCounters * 16];
    const bool whole = count - at >= kCounters;
    for (int i = 0; i < kWides; ++i) store_counters((whole ? to : part) + i * kWide * 16, a[i], b[i], c[i], d[i]);
    if (!whole) std::memcpy(to, part, size_t(count - at) * 16);
  }
}

// Write the converted word of each cell (first_row + r, first_column + c) to out[r * num_columns + c]. The counter is
// (low and high word of the row, column / 4, 0), and a cell uses word column % 4.
template <typename T, typename Convert>
void random_words(uint64_t key, uint64_t first_row, int64_t num_rows, uint64_t first_column, int64_t num_columns, T* out,
                  Convert convert) {
  constexpr int64_t kMost = 256;  // Counters at a time.
  static constexpr std::array<int64_t, kMost> kRows = [] {
    std::array<int64_t, kMost> rows{};
    for (int64_t r = 0; r < kMost; ++r) rows[size_t(r)] = r;
    return rows;
  }();
  uint32_t words[4 * kMost];
  for (int64_t done = 0; done < num_columns;) {
    const uint64_t column = first_column + uint64_t(done);
    const int64_t skipped = int64_t(column % 4), cells = std::min(num_columns - done, 4 * kMost - skipped);
    const int64_t groups = (skipped + cells + 3) / 4, most_rows = kMost / groups;
    for (int64_t r = 0; r < num_rows; r += most_rows) {
      const int64_t n = std::min(most_rows, num_rows - r);
      philox_words({key, first_row + uint64_t(r), uint32_t(column / 4), 0}, kRows.data(), n, groups, words);
      if (cells == groups * 4 && cells == num_columns) {  // Rows are contiguous.
        std::transform(words, words + n * num_columns, out + r * num_columns, convert);
        continue;
      }
      for (int64_t k = 0; k < n; ++k) {
        const uint32_t* row = words + k * groups * 4 + skipped;
        std::transform(row, row + cells, out + (r + k) * num_columns + done, convert);
      }
    }
    done += cells;
  }
}

// Write the words of one row without conversion.
inline void random_words(uint64_t key, uint64_t row, uint64_t first_column, int64_t count, uint32_t* out) {
  random_words(key, row, 1, first_column, count, out, [](uint32_t word) { return word; });
}

}  // namespace meseta

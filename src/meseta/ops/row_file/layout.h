// Layout of records in a file: entries in groups of whole blocks, groups in segments. A segment is written in one
// request.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace meseta::row_file {

constexpr size_t kPageBytes = 4096;  // Alignment of memory for direct I/O, and of segments.
constexpr size_t kTrailerBytes = 8;  // After a record: its row, and the checksum of both.
constexpr size_t kMaxGroupBlocks = 16;
constexpr double kMaxSpaceFactor = 1.45;  // File size / size of records. 1.5 is promised, and a step of growth is smaller.

// Return how often a row is written on average, if random rows are written and `share` of the file are rows. Cleaned
// segments have a fraction p of their rows left, and share = (p - 1) / ln p (J. Menon, A performance comparison of RAID-5
// and log-structured arrays, 1995).
inline double write_amplification(double share) {
  double low = 1e-6, high = 0.98;  // Beyond that, cleaning frees hardly any space.
  for (int i = 0; i < 30; ++i) {
    const double p = (low + high) / 2;
    ((p - 1) / std::log(p) < share ? low : high) = p;
  }
  return 1 / (1 - low);
}

struct Layout {
  size_t record_bytes = 0;
  size_t entry_bytes = 0;  // Size of a record with its trailer.
  size_t block_bytes = 0;  // Minimum transfer size of the device.
  size_t group_bytes = 0;
  uint32_t group_entries = 0;
  size_t segment_bytes = 0;
  uint32_t segment_entries = 0;

  // Groups of few blocks waste space at their ends. Groups of many blocks have more entries that extend over two blocks.
  // Wasted space makes the file fuller, and the fuller it is, the more rows cleaning moves. The group size is chosen by
  // the bytes read per entry and the total bytes written per entry.
  static Layout of(size_t record_bytes, size_t block_bytes, size_t least_segment_bytes) {
    Layout layout;
    layout.record_bytes = record_bytes;
    layout.entry_bytes = record_bytes + kTrailerBytes;
    layout.block_bytes = block_bytes;
    const size_t first = (layout.entry_bytes + block_bytes - 1) / block_bytes;
    double best = 0;
    for (size_t blocks = first; blocks <= first + kMaxGroupBlocks; ++blocks) {
      const size_t entries = blocks * block_bytes / layout.entry_bytes;
      size_t read = 0;
      for (size_t i = 0; i < entries; ++i) read += layout.span(i * layout.entry_bytes);
      const double space = double(blocks * block_bytes) / double(entries);
      const double cost = double(read) / double(entries) + space * write_amplification(space / (kMaxSpaceFactor * double(record_bytes)));
      if (best == 0 || cost < best) {
        best = cost;
        layout.group_bytes = blocks * block_bytes;
        layout.group_entries = static_cast<uint32_t>(entries);
      }
    }
    const size_t step = std::lcm(layout.group_bytes, kPageBytes);
    layout.segment_bytes = (std::max<size_t>(least_segment_bytes, 1) + step - 1) / step * step;
    layout.segment_entries = static_cast<uint32_t>(layout.segment_bytes / layout.group_bytes * layout.group_entries);
    return layout;
  }

  // Return the byte offset of an entry within its segment.
  size_t place(uint32_t entry) const {
    return entry / group_entries * group_bytes + entry % group_entries * entry_bytes;
  }

  // Return the size of the blocks that contain the entry at `place`.
  size_t span(size_t place) const { return block_end(place) - block_begin(place); }
  size_t block_begin(size_t place) const { return place / block_bytes * block_bytes; }
  size_t block_end(size_t place) const {
    return (place + entry_bytes + block_bytes - 1) / block_bytes * block_bytes;
  }
};

}  // namespace meseta::row_file

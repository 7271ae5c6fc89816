// How records lie in a file: entries in groups of whole blocks, groups in segments. A segment is what is written at
// once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace meseta::row_file {

constexpr size_t kPageBytes = 4096;  // memory for direct transfers, and the borders of segments
constexpr size_t kTrailerBytes = 8;  // behind a record: its row, and the checksum of both
constexpr size_t kMostGroupBlocks = 16;

struct Layout {
  size_t record_bytes = 0;
  size_t entry_bytes = 0;  // a record and its trailer
  size_t block_bytes = 0;  // what the device transfers at least
  size_t group_bytes = 0;
  uint32_t group_entries = 0;
  size_t segment_bytes = 0;
  uint32_t segment_entries = 0;

  // Groups of few blocks waste their ends, groups of many have more entries that lie across two blocks. The group is
  // chosen by the product of both: bytes read for an entry, times bytes that it takes in the file.
  static Layout of(size_t record_bytes, size_t block_bytes, size_t least_segment_bytes) {
    Layout layout;
    layout.record_bytes = record_bytes;
    layout.entry_bytes = record_bytes + kTrailerBytes;
    layout.block_bytes = block_bytes;
    const size_t first = (layout.entry_bytes + block_bytes - 1) / block_bytes;
    double best = 0;
    for (size_t blocks = first; blocks <= first + kMostGroupBlocks; ++blocks) {
      const size_t entries = blocks * block_bytes / layout.entry_bytes;
      size_t read = 0;
      for (size_t i = 0; i < entries; ++i) read += layout.span(i * layout.entry_bytes);
      const double cost = double(read) / double(entries) * double(blocks * block_bytes) / double(entries);
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

  // Where an entry of a segment begins, in bytes from the segment's begin.
  size_t place(uint32_t entry) const {
    return entry / group_entries * group_bytes + entry % group_entries * entry_bytes;
  }

  // Bytes of the blocks in which the entry at a place lies.
  size_t span(size_t place) const { return block_end(place) - block_begin(place); }
  size_t block_begin(size_t place) const { return place / block_bytes * block_bytes; }
  size_t block_end(size_t place) const {
    return (place + entry_bytes + block_bytes - 1) / block_bytes * block_bytes;
  }
};

}  // namespace meseta::row_file

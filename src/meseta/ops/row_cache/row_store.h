// Backing store of a cache: a file, or host memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "ops/row_file/reading.h"

namespace meseta::row_cache {

using row_file::Failure;
using row_file::PendingLogRead;

class RowStore {
 public:
  virtual ~RowStore() = default;
  virtual size_t record_bytes() const = 0;
  virtual int64_t num_rows() const = 0;
  // Start to read rows into records `out` [count, record_bytes]. `present` is false for unwritten rows. Returns null if
  // the read is already complete.
  virtual std::unique_ptr<PendingLogRead> read(const int64_t* rows, int64_t count, uint8_t* out, bool* present) = 0;
  virtual Failure write(const int64_t* rows, const uint8_t* records, int64_t count) = 0;
};

class FileRowStore final : public RowStore {
 public:
  explicit FileRowStore(std::shared_ptr<row_file::RowLog> log) : log_(std::move(log)) {}
  size_t record_bytes() const override { return log_->layout().record_bytes; }
  int64_t num_rows() const override { return log_->num_rows(); }

  std::unique_ptr<PendingLogRead> read(const int64_t* rows, int64_t count, uint8_t* out, bool* present) override {
    auto reading = std::make_unique<PendingLogRead>(log_);
    reading->ticket.rows = rows;
    reading->ticket.count = count;
    reading->start({{out, record_bytes(), 0}}, present);
    return reading;
  }

  Failure write(const int64_t* rows, const uint8_t* records, int64_t count) override {
    int64_t taken;
    const row_file::ConstField record{records, record_bytes(), 0};
    return log_->write(rows, {&record, 1}, count, taken);
  }

 private:
  std::shared_ptr<row_file::RowLog> log_;
};

class MemoryRowStore final : public RowStore {
 public:
  // Memory of the caller, [num_rows, record_bytes] and [num_rows].
  MemoryRowStore(uint8_t* records, bool* present, int64_t num_rows, size_t record_bytes)
      : records_(records), present_(present), num_rows_(num_rows), record_bytes_(record_bytes) {}
  size_t record_bytes() const override { return record_bytes_; }
  int64_t num_rows() const override { return num_rows_; }

  std::unique_ptr<PendingLogRead> read(const int64_t* rows, int64_t count, uint8_t* out, bool* present) override {
    for (int64_t i = 0; i < count; ++i) {
      present[i] = present_[rows[i]];
      if (present[i]) std::memcpy(out + size_t(i) * record_bytes_, records_ + size_t(rows[i]) * record_bytes_, record_bytes_);
    }
    return nullptr;
  }

  Failure write(const int64_t* rows, const uint8_t* records, int64_t count) override {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(records_ + size_t(rows[i]) * record_bytes_, records + size_t(i) * record_bytes_, record_bytes_);
      present_[rows[i]] = true;
    }
    return {};
  }

 private:
  uint8_t* records_;
  bool* present_;
  int64_t num_rows_;
  size_t record_bytes_;
};

}  // namespace meseta::row_cache

// Read of rows from a file in progress.
#pragma once

#include <memory>
#include <utility>

#include "ops/row_file/log.h"

namespace meseta::row_file {

// The owner must keep the arrays that the read uses. Destruction waits for the read.
class PendingLogRead {
 public:
  explicit PendingLogRead(std::shared_ptr<RowLog> log) : log_(std::move(log)) {}
  ~PendingLogRead() {
    if (ticket.client == nullptr) return;
    ticket.wait();
    log_->counters.ticket_bytes -= ticket.count * int64_t(sizeof(uint64_t));
    ticket.frozen.reset();
  }
  PendingLogRead(const PendingLogRead&) = delete;
  PendingLogRead& operator=(const PendingLogRead&) = delete;

  // Start to read the rows of the ticket.
  void start(std::vector<Field> fields, bool* is_written) {
    ticket.parts.resize(size_t(ticket.count));
    log_->counters.ticket_bytes += ticket.count * int64_t(sizeof(uint64_t));
    ticket.client = log_.get();
    ticket.fields = std::move(fields);
    ticket.present = is_written;
    log_->submit(ticket);
  }

  Failure wait() {
    const auto begun = Clock::now();
    const Failure failure = ticket.wait();
    log_->counters.wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begun).count();
    return failure;
  }

  ReadTicket ticket;

 private:
  std::shared_ptr<RowLog> log_;
};

}  // namespace meseta::row_file

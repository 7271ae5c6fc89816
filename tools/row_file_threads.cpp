// Threads that write, read, freeze and thaw one row file concurrently until it is closed, under ThreadSanitizer; see
// sanitize_threads.sh. No row may revert to an older write.
//   row_file_threads FOLDER SECONDS
#include <cstdio>
#include <numeric>
#include <random>
#include <string>

#include <fcntl.h>

#include "ops/row_file/log.h"
#include "ops/row_file/ring.h"
#include "ops/row_file/threads.h"

using namespace meseta::row_file;

namespace {

struct Table {
  int64_t rows, parts, batch, words;
  size_t record_bytes() const { return size_t(words) * sizeof(int64_t); }

  std::vector<int64_t> random_rows(uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::vector<int64_t> rows_of(static_cast<size_t>(batch));
    for (int64_t& row : rows_of) row = int64_t(random() % uint64_t(rows));
    return rows_of;
  }
};
constexpr Table kMany{20'000, 4, 500, 8};
constexpr Table kFew{10, 1, 300, 625};  // few to a segment: cleaning often waits for room, with a row in its hand

// A record is its row and the number of its write, over and over.
void fill(int64_t row, int64_t version, uint8_t* record, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 8) std::memcpy(record + at, at % 16 ? &version : &row, 8);
}

int64_t version_of(int64_t row, const uint8_t* record, size_t bytes) {
  std::vector<int64_t> words(bytes / 8);
  std::memcpy(words.data(), record, bytes);
  for (size_t word = 0; word < words.size(); ++word)
    if (words[word] != words[word % 2] || words[0] != row) {
      std::fprintf(stderr, "row %ld is wrong\n", long(row));
      std::abort();
    }
  return words[1];
}

// False where the file is closed.
bool is_open(const Failure& failure) {
  if (failure && failure.kind != Failure::kClosed) std::abort();
  return !failure;
}

// No row may be newer than `most`, or older than in `least` [all rows].
bool read(RowLog& log, std::shared_ptr<Frozen> frozen, const std::vector<int64_t>& rows, int64_t most,
          const std::vector<int64_t>& least) {
  const size_t bytes = log.layout().record_bytes;
  std::vector<uint8_t> out(rows.size() * bytes);
  std::unique_ptr<bool[]> present(new bool[rows.size()]);
  Ticket ticket;
  ticket.client = &log;
  ticket.frozen = std::move(frozen);
  ticket.rows = ticket.frozen == nullptr ? rows.data() : nullptr;
  ticket.first = rows.front();
  ticket.count = int64_t(rows.size());
  ticket.out = out.data();
  ticket.present = present.get();
  ticket.parts.resize(rows.size());
  log.submit(ticket);
  if (!is_open(ticket.wait())) return false;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t version = present[i] ? version_of(rows[i], out.data() + i * bytes, bytes) : 0;
    if (version > most || version < least[size_t(rows[i])]) {
      std::fprintf(stderr, "row %ld is of write %ld\n", long(rows[i]), long(version));
      std::abort();
    }
  }
  return true;
}

void try_engine(const Table& table, std::shared_ptr<Engine> engine, const std::string& path, double seconds) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
  const size_t bytes = table.record_bytes();
  const auto log = std::make_shared<RowLog>(engine, file, table.rows, Layout::of(bytes, 512, 4096), 7,
                                            table.rows / table.parts);
  std::atomic<int64_t> version{0};
  std::vector<std::atomic<int64_t>> written(static_cast<size_t>(table.rows));  // the write that each row has at least
  const auto seen = [&written] { return std::vector<int64_t>(written.begin(), written.end()); };
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    std::vector<uint8_t> records(size_t(table.batch) * bytes);
    for (;;) {
      const int64_t now = ++version;
      const std::vector<int64_t> rows = table.random_rows(uint64_t(now));
      for (size_t i = 0; i < rows.size(); ++i) fill(rows[i], now, records.data() + i * bytes, bytes);
      int64_t taken;
      if (!is_open(log->write(rows.data(), records.data(), table.batch, taken))) return;
      for (const int64_t row : rows) written[size_t(row)] = now;
      if (now % 50 == 0 && !is_open(log->flush())) return;
    }
  });
  for (uint64_t reader = 1; reader <= 2; ++reader)
    threads.emplace_back([&, reader] {
      uint64_t turn = reader << 32;
      while (read(*log, nullptr, table.random_rows(turn), INT64_MAX, seen())) ++turn;
    });
  threads.emplace_back([&] {
    std::vector<int64_t> rows(static_cast<size_t>(table.rows));
    std::iota(rows.begin(), rows.end(), 0);
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // cleaning has its turn
      const std::vector<int64_t> least = seen();
      const auto frozen = log->freeze();
      const int64_t most = version;
      if (!read(*log, frozen, rows, most, least)) return;
      log->forget(*frozen, table.rows / 2);
      log->sizes();
    }
  });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  log->close();
  close(file);
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld writes, %ld reads, %ld rows moved\n", long(version.load()), long(log->counters.reads.load()),
              long(log->counters.rows_cleaned.load()));
  unlink(path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string path = std::string(argv[1]) + "/row_file_threads.bin";
  const double seconds = std::stod(argv[2]);
  try_engine(kMany, std::make_shared<ThreadEngine>(8, 0), path, seconds);
  try_engine(kFew, std::make_shared<ThreadEngine>(1, 0), path, seconds);
#if defined(MESETA_IO_URING)
  std::shared_ptr<Engine> ring;
  try {
    ring = std::make_shared<RingEngine>(64, 0);
  } catch (const std::system_error& error) {
    std::printf("io_uring is left out: %s\n", error.what());
    return 0;
  }
  try_engine(kMany, std::move(ring), path, seconds);
#endif
  return 0;
}

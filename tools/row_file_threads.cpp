// Threads that write, read, freeze and thaw one file of rows at once, under ThreadSanitizer; see sanitize_threads.sh.
//   row_file_threads FOLDER SECONDS
#include <cstdio>
#include <random>
#include <string>

#include <fcntl.h>

#include "ops/row_file/log.h"
#include "ops/row_file/ring.h"
#include "ops/row_file/threads.h"

using namespace meseta::row_file;

namespace {

constexpr int64_t kRows = 20'000, kBatch = 500, kWords = 8;
constexpr size_t kRecord = kWords * sizeof(int64_t);

// A record is its row and the number of its write, over and over.
void fill(int64_t row, int64_t version, uint8_t* record) {
  for (int64_t word = 0; word < kWords; ++word) std::memcpy(record + word * 8, word % 2 ? &version : &row, 8);
}

int64_t version_of(int64_t row, const uint8_t* record) {
  int64_t words[kWords];
  std::memcpy(words, record, kRecord);
  for (int64_t word = 0; word < kWords; ++word)
    if (words[word] != words[word % 2] || words[0] != row) {
      std::fprintf(stderr, "row %ld is wrong\n", long(row));
      std::abort();
    }
  return words[1];
}

void read(RowLog& log, std::shared_ptr<Frozen> frozen, const std::vector<int64_t>& rows, int64_t most) {
  std::vector<uint8_t> out(rows.size() * kRecord);
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
  if (ticket.wait()) std::abort();
  for (size_t i = 0; i < rows.size(); ++i)
    if (present[i] && version_of(rows[i], out.data() + i * kRecord) > most) std::abort();
}

void try_engine(std::shared_ptr<Engine> engine, const std::string& path, double seconds) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
  const auto log = std::make_shared<RowLog>(engine, file, kRows, Layout::of(kRecord, 512, 4096), 7, kRows / 4);
  std::atomic<bool> over{false};
  std::atomic<int64_t> version{0};
  const auto random_rows = [](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<int64_t> rows(kBatch);
    for (int64_t& row : rows) row = int64_t(random() % kRows);
    return rows;
  };
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    std::vector<uint8_t> records(kBatch * kRecord);
    while (!over) {
      const int64_t now = ++version;
      const std::vector<int64_t> rows = random_rows(uint64_t(now));
      for (int64_t i = 0; i < kBatch; ++i) fill(rows[size_t(i)], now, records.data() + size_t(i) * kRecord);
      int64_t taken;
      if (log->write(rows.data(), records.data(), kBatch, taken)) std::abort();
      if (now % 50 == 0 && log->flush()) std::abort();
    }
  });
  for (uint64_t reader = 1; reader <= 2; ++reader)
    threads.emplace_back([&, reader] {
      for (uint64_t turn = 0; !over; ++turn) read(*log, nullptr, random_rows(reader << 32 | turn), INT64_MAX);
    });
  threads.emplace_back([&] {
    std::vector<int64_t> rows(kRows);
    for (int64_t row = 0; row < kRows; ++row) rows[size_t(row)] = row;
    while (!over) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // cleaning has its turn
      const auto frozen = log->freeze();
      const int64_t most = version;
      read(*log, frozen, rows, most);
      log->forget(*frozen, kRows / 2);
      log->sizes();
    }
  });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  over = true;
  for (std::thread& thread : threads) thread.join();
  std::printf("%ld writes, %ld reads, %ld rows moved\n", long(version.load()), long(log->counters.reads.load()),
              long(log->counters.rows_cleaned.load()));
  log->close();
  close(file);
  unlink(path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string path = std::string(argv[1]) + "/row_file_threads.bin";
  try_engine(std::make_shared<ThreadEngine>(8, 0), path, std::stod(argv[2]));
#if defined(MESETA_IO_URING)
  std::shared_ptr<Engine> ring;
  try {
    ring = std::make_shared<RingEngine>(64, 0);
  } catch (const std::system_error& error) {
    std::printf("io_uring is left out: %s\n", error.what());
    return 0;
  }
  try_engine(std::move(ring), path, std::stod(argv[2]));
#endif
  return 0;
}

// Python bindings of row files. See log.h for files, and engine.h for transfers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "ops/checks.h"
#include "ops/row_file/handles.h"
#include "ops/row_file/reading.h"
#include "ops/row_file/ring.h"
#include "ops/row_file/threads.h"

namespace nb = nanobind;
using namespace meseta;
using namespace meseta::row_file;

namespace {

using Rows = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Records = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Present = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FailureFields = std::vector<int64_t>;

constexpr const char* kEngine = "row engine";
constexpr const char* kFrozen = "frozen rows";
constexpr const char* kTicket = "row read";

FailureFields failure_fields(const Failure& f) { return {f.kind, f.code, f.row, f.place, f.writing}; }

// Return 0, or the error with which the system refuses to create a ring. -1 if the core was built without io_uring.
int io_uring_error() {
#if defined(MESETA_IO_URING)
  try {
    const Ring ring(8);
    return 0;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
#else
  return -1;
#endif
}

nb::capsule open_row_engine(bool io_uring, int depth, double max_reads_per_s) {
  if (depth < 1 || depth > 1024 || !(max_reads_per_s >= 0)) throw_invalid_argument("open_row_engine: depth must be in 1..1024");
  std::shared_ptr<Engine> engine;
  if (io_uring) {
#if defined(MESETA_IO_URING)
    engine = std::make_shared<RingEngine>(depth, max_reads_per_s);
#else
    throw_invalid_argument("open_row_engine: this core was built without io_uring");
#endif
  } else {
    engine = std::make_shared<ThreadEngine>(depth, max_reads_per_s);
  }
  return to_capsule(std::move(engine), kEngine);
}

nb::capsule open_row_log(nb::capsule engine, int descriptor, int64_t rows, std::vector<int64_t> sizes, uint32_t salt) {
  if (sizes.size() != 4) throw_invalid_argument("open_row_log: pass the sizes of a record, a block and a segment, and the rows of a part");
  const auto [record, block, segment, part] = std::array{sizes[0], sizes[1], sizes[2], sizes[3]};
  if (rows < 0 || rows > int64_t{1} << 31 || record < 1 || block < 512 || block > 4096 || (block & (block - 1)) != 0 ||
      segment < 0 || segment > int64_t{1} << 30 || part < 1 || record + 2 * block > int64_t(kLargeBytes))
    throw_invalid_argument("open_row_log: ", rows, " rows of ", record, " bytes, blocks of ", block, ", are out of range");
  const Layout layout = Layout::of(size_t(record), size_t(block), size_t(segment));
  return to_capsule(std::make_shared<RowLog>(held<Engine>(engine, kEngine), descriptor, rows, layout, salt, part), kLog);
}

// Return the fields of `count` rows. `values` are [count, bytes] each, whose columns together are the records.
template <typename Byte, typename Array>
std::vector<FieldOf<Byte>> fields_of(const RowLog& log, const std::vector<Array>& values, int64_t count) {
  std::vector<FieldOf<Byte>> fields;
  size_t at = 0;
  for (const Array& value : values) {
    if (int64_t(value.shape(0)) != count) throw_invalid_argument("there are ", count, " rows, but values of ", value.shape(0));
    fields.push_back({value.data(), value.shape(1), at});
    at += value.shape(1);
  }
  if (at != log.layout().record_bytes)
    throw_invalid_argument("the values of a row have ", at, " bytes, but its record has ", log.layout().record_bytes);
  return fields;
}

void check(const RowLog& log, Rows rows) {
  for (size_t i = 0; i < rows.shape(0); ++i)
    if (rows.data()[i] < 0 || rows.data()[i] >= log.num_rows())
      throw_invalid_argument("rows[", i, "] is ", rows.data()[i], "; the file has rows 0..", log.num_rows() - 1);
}

FailureFields write_rows(nb::capsule log, Rows rows, const std::vector<Records>& values) {
  const auto file = held<RowLog>(log, kLog);
  nb::gil_scoped_release unlocked;
  const auto count = int64_t(rows.shape(0));
  const auto fields = fields_of<const uint8_t>(*file, values, count);
  check(*file, rows);
  int64_t taken;
  FailureFields result = failure_fields(file->write(rows.data(), fields, count, taken));
  result.push_back(taken);
  return result;
}

// A read with the arrays that it writes to.
struct ReadHandle {
  PendingLogRead reading;
  Rows rows;
  std::vector<Out> values;
  Present present;
};

nb::capsule hold_reading(ReadHandle* reading) {
  return nb::capsule(new std::pair(reading, getpid()), kTicket, [](void* memory) noexcept {
    auto* held = static_cast<std::pair<ReadHandle*, pid_t>*>(memory);
    if (held->second != getpid()) return;
    {
      nb::gil_scoped_release unlocked;
      held->first->reading.ticket.wait();
    }
    delete held->first;
    delete held;
  });
}

PendingLogRead& reading_of(const nb::capsule& capsule) {
  if (capsule.name() == nullptr || std::string(capsule.name()) != kTicket) throw_invalid_argument("the handle is not a ", kTicket);
  auto* held = static_cast<std::pair<ReadHandle*, pid_t>*>(capsule.data());
  if (held->second != getpid()) throw_invalid_argument("the ", kTicket, " belongs to the parent of this forked process");
  return held->first->reading;
}

nb::capsule read_rows(nb::capsule log, Rows rows, Out out, Present is_written) {
  const auto file = held<RowLog>(log, kLog);
  auto fields = fields_of<uint8_t>(*file, std::vector{out}, int64_t(rows.shape(0)));
  check(*file, rows);
  if (is_written.shape(0) != rows.shape(0)) throw_invalid_argument("is_written has ", is_written.shape(0), " entries for ", rows.shape(0), " rows");
  auto held_reading = std::unique_ptr<ReadHandle>(new ReadHandle{PendingLogRead(file), rows, {out}, is_written});
  held_reading->reading.ticket.rows = rows.data();
  held_reading->reading.ticket.count = int64_t(rows.shape(0));
  held_reading->reading.start(std::move(fields), is_written.data());
  return hold_reading(held_reading.release());
}

// Read rows first, first + 1, ..., or the listed rows, which must be sorted.
nb::capsule read_snapshot_rows(nb::capsule snapshot, int64_t first, std::optional<Rows> listed,
                             const std::vector<Out>& values, Present is_written) {
  const auto rows = held<RowLogSnapshot>(snapshot, kFrozen);
  const auto count = int64_t(is_written.shape(0));
  if (listed) {
    check(*rows->log, *listed);
    if (int64_t(listed->shape(0)) != count) throw_invalid_argument("is_written has ", count, " entries for ", listed->shape(0), " rows");
  } else if (first < 0 || count > rows->log->num_rows() - first) {
    throw_invalid_argument("rows ", first, "..", first + count - 1, " are not among the ", rows->log->num_rows(), " rows of the snapshot");
  }
  auto fields = fields_of<uint8_t>(*rows->log, values, count);
  auto held_reading = std::unique_ptr<ReadHandle>(
      new ReadHandle{PendingLogRead(rows->log), listed.value_or(Rows()), values, is_written});
  held_reading->reading.ticket.frozen = rows;
  if (listed) held_reading->reading.ticket.rows = listed->data();
  held_reading->reading.ticket.first = first;
  held_reading->reading.ticket.count = count;
  {
    nb::gil_scoped_release unlocked;
    held_reading->reading.start(std::move(fields), is_written.data());
  }
  return hold_reading(held_reading.release());
}

FailureFields wait_rows(nb::capsule reading) {
  PendingLogRead& one = reading_of(reading);
  nb::gil_scoped_release unlocked;
  return failure_fields(one.wait());
}

bool rows_are_read(nb::capsule reading) { return reading_of(reading).ticket.done(); }

nb::capsule snapshot_rows(nb::capsule log) { return to_capsule(held<RowLog>(log, kLog)->freeze(), kFrozen); }

FailureFields flush_rows(nb::capsule log) {
  const auto file = held<RowLog>(log, kLog);
  nb::gil_scoped_release unlocked;
  return failure_fields(file->flush());
}

void close_row_log(nb::capsule log) {
  const auto file = held<RowLog>(log, kLog);
  nb::gil_scoped_release unlocked;
  file->close();
}

std::vector<int64_t> row_log_numbers(nb::capsule log) {
  const auto file = held<RowLog>(log, kLog);
  const auto sizes = file->sizes();
  const RowLogCounters& c = file->counters;
  return {sizes.memory_bytes, sizes.file_bytes, sizes.rows, c.reads,        c.read_bytes,   c.rows_read,
          c.rows_from_memory, c.rows_unwritten,    c.writes,   c.written_bytes, c.rows_written, c.rows_cleaned,
          c.cleaned_bytes,    c.wait_ns};
}

std::vector<int64_t> row_engine_latencies(nb::capsule engine) {
  const LatencyHistogram latencies = held<Engine>(engine, kEngine)->latencies();
  return {latencies.counts.begin(), latencies.counts.end()};
}

int64_t row_engine_bytes(nb::capsule engine) { return held<Engine>(engine, kEngine)->num_bytes(); }

void limit_row_engine(nb::capsule engine, double max_reads_per_s) {
  held<Engine>(engine, kEngine)->limit(max_reads_per_s);
}

std::vector<int64_t> row_layout(int64_t record_bytes, int64_t block_bytes, int64_t segment_bytes) {
  const Layout layout = Layout::of(size_t(record_bytes), size_t(block_bytes), size_t(segment_bytes));
  int64_t read = 0;
  for (uint32_t i = 0; i < layout.segment_entries; ++i) read += int64_t(layout.span(layout.place(i)));
  return {int64_t(layout.entry_bytes), int64_t(layout.group_bytes), layout.group_entries,
          int64_t(layout.segment_bytes), layout.segment_entries, read};
}

uint32_t checksum(nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data, uint32_t begin,
                  bool by_table) {
  return by_table ? crc32c_by_table(begin, data.data(), data.size()) : crc32c(begin, data.data(), data.size());
}

}  // namespace

void bind_row_file(nb::module_& m) {
  m.def("io_uring_error", &io_uring_error);
  m.def("open_row_engine", &open_row_engine, nb::arg("io_uring"), nb::arg("depth"), nb::arg("max_reads_per_s"));
  m.def("limit_row_engine", &limit_row_engine, nb::arg("engine"), nb::arg("max_reads_per_s"));
  m.def("row_engine_latencies", &row_engine_latencies, nb::arg("engine"));
  m.def("row_engine_bytes", &row_engine_bytes, nb::arg("engine"));
  m.def("open_row_log", &open_row_log, nb::arg("engine"), nb::arg("descriptor"), nb::arg("rows"), nb::arg("sizes"),
        nb::arg("salt"));
  m.def("write_rows", &write_rows, nb::arg("log"), nb::arg("rows"), nb::arg("values"));
  m.def("read_rows", &read_rows, nb::arg("log"), nb::arg("rows"), nb::arg("out"), nb::arg("is_written"));
  m.def("read_snapshot_rows", &read_snapshot_rows, nb::arg("snapshot"), nb::arg("first"), nb::arg("listed").none(),
        nb::arg("values"), nb::arg("is_written"));
  m.def("wait_rows", &wait_rows, nb::arg("reading"));
  m.def("rows_are_read", &rows_are_read, nb::arg("reading"));
  m.def("snapshot_rows", &snapshot_rows, nb::arg("log"));
  m.def("flush_rows", &flush_rows, nb::arg("log"));
  m.def("close_row_log", &close_row_log, nb::arg("log"));
  m.def("row_log_numbers", &row_log_numbers, nb::arg("log"));
  m.def("row_layout", &row_layout, nb::arg("record_bytes"), nb::arg("block_bytes"), nb::arg("segment_bytes"));
  m.def("crc32c", &checksum, nb::arg("data"), nb::arg("begin"), nb::arg("by_table"));
}

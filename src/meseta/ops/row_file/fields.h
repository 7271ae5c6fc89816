// Values of rows that are stored in separate tensors, and adjacent in records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace meseta::row_file {

// One value of each row, [rows, bytes], and its position in a record.
template <typename Byte>
struct FieldOf {
  Byte* values;
  size_t bytes, at;
};
using Field = FieldOf<uint8_t>;
using ConstField = FieldOf<const uint8_t>;

// Copy a record to the values of row `row`.
inline void scatter(std::span<const Field> fields, size_t row, const uint8_t* record) {
  for (const Field& field : fields) std::memcpy(field.values + row * field.bytes, record + field.at, field.bytes);
}

// Copy the values of row `row` to their record.
template <typename Byte>
void gather(std::span<const FieldOf<Byte>> fields, size_t row, uint8_t* record) {
  for (const FieldOf<Byte>& field : fields) std::memcpy(record + field.at, field.values + row * field.bytes, field.bytes);
}

}  // namespace meseta::row_file

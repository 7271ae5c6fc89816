// XXH64 of every string of an Arrow binary array, implemented from the published specification (Y. Collet, "xxHash fast
// digest algorithm", version 0.1.1).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

inline uint64_t rotate_left(uint64_t x, int bits) {
  return (x << bits) | (x >> (64 - bits));
}

// The specification reads little-endian words on every machine.
template <typename Word>
inline uint64_t read_word(const uint8_t* p) {
  Word word = 0;
  for (size_t byte = 0; byte < sizeof(Word); ++byte) {
    word |= static_cast<Word>(p[byte]) << (8 * byte);
  }
  return word;
}

inline uint64_t round(uint64_t lane, uint64_t input) {
  return rotate_left(lane + input * kPrime2, 31) * kPrime1;
}

inline uint64_t merge(uint64_t hash, uint64_t lane) {
  return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

inline uint64_t xxh64(const uint8_t* p, size_t length, uint64_t seed) {
  const uint8_t* const end = p + length;
  uint64_t hash;
  if (length >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; end - p >= 32; p += 32) {
      for (int i = 0; i < 4; ++i) {
        lanes[i] = round(lanes[i], read_word<uint64_t>(p + 8 * i));
      }
    }
    hash = rotate_left(lanes[0], 1) + rotate_left(lanes[1], 7) + rotate_left(lanes[2], 12) + rotate_left(lanes[3], 18);
    for (uint64_t lane : lanes) {
      hash = merge(hash, lane);
    }
  } else {
    hash = seed + kPrime5;
  }
  hash += length;
  for (; end - p >= 8; p += 8) {
    hash = rotate_left(hash ^ round(0, read_word<uint64_t>(p)), 27) * kPrime1 + kPrime4;
  }
  if (end - p >= 4) {
    hash = rotate_left(hash ^ (read_word<uint32_t>(p) * kPrime1), 23) * kPrime2 + kPrime3;
    p += 4;
  }
  for (; p < end; ++p) {
    hash = rotate_left(hash ^ (*p * kPrime5), 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Hash every string, convert the hash to an `Out` by `finish`, and write it to `out`. Releases the GIL.
template <typename Offset, typename Out, typename Finish>
void hash_all(Array<const uint8_t> data, Array<const Offset> offsets, uint64_t seed, Array<Out> out, Finish finish) {
  const size_t count = out.shape(0);
  if (offsets.shape(0) != count + 1) {
    throw std::invalid_argument("hash_categories: " + std::to_string(offsets.shape(0)) + " offsets do not fit " +
                                std::to_string(count) + " outputs; an array of n strings has n + 1 offsets");
  }
  const uint8_t* const bytes = data.data();
  const Offset* const bounds = offsets.data();
  const auto size = static_cast<int64_t>(data.shape(0));
  Out* const result = out.data();
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) {
    const int64_t start = bounds[i], stop = bounds[i + 1];
    if (start < 0 || stop < start || stop > size) {
      throw std::invalid_argument("hash_categories: string " + std::to_string(i) + " spans bytes " +
                                  std::to_string(start) + ".." + std::to_string(stop) + " of a buffer of " +
                                  std::to_string(size));
    }
    result[i] = finish(xxh64(bytes + start, static_cast<size_t>(stop - start), seed));
  }
}

template <typename Offset>
void hash_strings(Array<const uint8_t> data, Array<const Offset> offsets, uint64_t seed, Array<uint64_t> out) {
  hash_all<Offset, uint64_t>(data, offsets, seed, out, [](uint64_t hash) { return hash; });
}

// The row is the upper 64 bits of hash * num_rows, which is distributed as evenly as a modulo, without a division.
template <typename Offset, typename Out>
void rows(Array<const uint8_t> data, Array<const Offset> offsets, uint64_t seed, uint64_t num_rows, Array<Out> out) {
  hash_all<Offset, Out>(data, offsets, seed, out, [num_rows](uint64_t hash) {
    return static_cast<Out>((static_cast<unsigned __int128>(hash) * num_rows) >> 64);
  });
}

}  // namespace

void bind_hash_categories(nb::module_& m) {
  m.def("hash_categories", &hash_strings<int32_t>, nb::arg("data"), nb::arg("offsets"), nb::arg("seed"), nb::arg("out"));
  m.def("hash_categories", &hash_strings<int64_t>, nb::arg("data"), nb::arg("offsets"), nb::arg("seed"), nb::arg("out"));
  const auto bind_rows = [&m](auto* function) {
    m.def("hash_categories_to_rows", function, nb::arg("data"), nb::arg("offsets"), nb::arg("seed"),
          nb::arg("num_rows"), nb::arg("out"));
  };
  bind_rows(&rows<int32_t, int32_t>);
  bind_rows(&rows<int32_t, int64_t>);
  bind_rows(&rows<int64_t, int32_t>);
  bind_rows(&rows<int64_t, int64_t>);
}

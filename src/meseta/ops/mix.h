// 64-bit hash functions of ids.
#pragma once

#include <cstdint>

namespace meseta {

// First output of SplitMix64 seeded with x (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA
// 2014, with the constants of Vigna's splitmix64.c).
inline uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The inverse of splitmix64. It exists because multipliers are odd, and shifts keep the upper bits.
inline uint64_t inverse_splitmix64(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3u;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089u;
  return (x ^ (x >> 30) ^ (x >> 60)) - 0x9E3779B97F4A7C15u;
}

// XXH64 of the eight bytes of x, least significant byte first ("xxHash fast digest algorithm", version 0.1.1).
inline uint64_t xxh64_of_word(uint64_t x, uint64_t seed) {
  constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u, kPrime2 = 0xC2B2AE3D27D4EB4Fu, kPrime3 = 0x165667B19E3779F9u,
                     kPrime4 = 0x85EBCA77C2B2AE63u, kPrime5 = 0x27D4EB2F165667C5u;
  const auto rotate = [](uint64_t y, int bits) { return y << bits | y >> (64 - bits); };
  uint64_t hash = (seed + kPrime5 + 8) ^ (rotate(x * kPrime2, 31) * kPrime1);
  hash = rotate(hash, 27) * kPrime1 + kPrime4;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

// The upper 64 bits of hash * size. For sizes below 2^32 it uses 32-bit products, which vectorize.
inline uint64_t reduce_small(uint64_t hash, uint64_t size) {
  return ((hash >> 32) * size + ((hash & 0xFFFFFFFFu) * size >> 32)) >> 32;
}
inline uint64_t reduce(uint64_t hash, uint64_t size) {
  return uint64_t((static_cast<unsigned __int128>(hash) * size) >> 64);
}

}  // namespace meseta

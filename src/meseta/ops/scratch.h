// Scratch memory that each thread keeps. New pages in every step would cost page faults and clearing.
#pragma once

#include <cstddef>
#include <memory>

namespace meseta {

// Return uninitialized memory for `count` values. It is valid until this thread requests the same type and slot again.
template <typename T, int kSlot = 0>
T* scratch(size_t count) {
  thread_local std::unique_ptr<T[]> kept;
  thread_local size_t size = 0;
  if (count > size) {
    size = 0;
    kept.reset(new T[count + count / 4]);
    size = count + count / 4;
  }
  return kept.get();
}

}  // namespace meseta

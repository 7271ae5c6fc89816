// Working memory that each thread keeps: fresh pages cost the kernel a fault and a clearing each, in every step.
#pragma once

#include <cstddef>
#include <memory>

namespace meseta {

// Room for `count` values, uninitialised, valid until this thread asks for the same type and slot again.
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

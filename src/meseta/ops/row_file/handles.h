// Python handles of the objects of row files.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include <unistd.h>

#include "ops/checks.h"

namespace meseta::row_file {

namespace nb = nanobind;

// Named capsules of C++ objects. A forked process has none of their threads and does not destroy them.
template <typename T>
struct CapsuleHandle {
  std::shared_ptr<T> object;
  pid_t process = getpid();
};

template <typename T>
nb::capsule to_capsule(std::shared_ptr<T> object, const char* name) {
  return nb::capsule(new CapsuleHandle<T>{std::move(object)}, name, [](void* memory) noexcept {
    auto* held = static_cast<CapsuleHandle<T>*>(memory);
    if (held->process != getpid()) return;
    nb::gil_scoped_release unlocked;
    delete held;
  });
}

template <typename T>
std::shared_ptr<T> held(const nb::capsule& capsule, const char* name) {
  if (capsule.name() == nullptr || std::string(capsule.name()) != name) throw_invalid_argument("the handle is not a ", name);
  auto* held = static_cast<CapsuleHandle<T>*>(capsule.data());
  if (held->process != getpid()) throw_invalid_argument("the ", name, " belongs to the parent of this forked process");
  return held->object;
}

constexpr const char* kLog = "row log";

}  // namespace meseta::row_file

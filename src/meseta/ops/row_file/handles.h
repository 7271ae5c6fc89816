// How Python holds the objects of files of rows, for all who take them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include <unistd.h>

#include "ops/checks.h"

namespace meseta::row_file {

namespace nb = nanobind;

// Objects of C++ in capsules, by name; a process that was forked has none of their threads and leaves them alone.
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
  if (capsule.name() == nullptr || std::string(capsule.name()) != name) throw_invalid_argument("this is no ", name);
  auto* held = static_cast<CapsuleHandle<T>*>(capsule.data());
  if (held->process != getpid()) throw_invalid_argument("the ", name, " belongs to the process that has forked this one");
  return held->object;
}

constexpr const char* kLog = "row log";

}  // namespace meseta::row_file

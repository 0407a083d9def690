// Scratch memory of the calling thread that lives from call to call and only grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace jaxtap {

// One block of memory, aligned to 64 bytes. `Tag` tells apart the uses that a thread has at once.
template <typename Tag>
class Arena {
 public:
  // At least `bytes`, with undefined contents; valid until this thread asks for more.
  static void* get(size_t bytes) {
    thread_local Arena arena;
    if (bytes > arena.bytes_) arena.grow(bytes);
    return arena.data_;
  }

  template <typename T>
  static T* get_array(int64_t count) {
    return static_cast<T*>(get(static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  static constexpr size_t kAlign = 64;

  Arena() = default;
  ~Arena() { std::free(data_); }

  void grow(size_t bytes) {
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    std::free(data_);
    bytes_ = 0;
    data_ = std::aligned_alloc(kAlign, bytes);
    if (data_ == nullptr) throw std::bad_alloc();
    bytes_ = bytes;
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace jaxtap

// A workspace and its parts, which begin at multiples of kWorkspaceAlignment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxtap::cuda {

constexpr size_t kWorkspaceAlignment = 256;

// Where the first part begins.
inline char* align_workspace(void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const size_t beyond = at % kWorkspaceAlignment;
  return static_cast<char*>(address) + (kWorkspaceAlignment - beyond) % kWorkspaceAlignment;
}

inline int64_t up_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Returns where a part begins that follows `bytes` bytes, and adds it to them if it's wanted.
inline size_t take_part(size_t& bytes, bool wanted, int64_t size) {
  const size_t begin = bytes;
  if (wanted) bytes += static_cast<size_t>(up_to(size, kWorkspaceAlignment));
  return begin;
}

}  // namespace jaxtap::cuda

// Memory that the system has promised, but not given yet.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jaxtap {

// Asks for large pages for what a kernel is about to fill. XLA gives each result memory that often
// comes from the system, page by page on first touch: 4,096 faults of some microseconds each for 16
// MiB, several times what it takes to fill it. Where Linux has large pages on request (its default)
// there are 8. Pages that are there stay as they are, and failing is no fault.
inline void ask_for_large_pages(const void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kLeast = int64_t{1} << 20;
  constexpr uintptr_t kLarge = uintptr_t{2} << 20;
  if (bytes < kLeast) return;
  // Up to the ends of large pages: results follow each other in memory, and one page may belong to
  // two. What isn't mapped there is left out.
  const auto first = reinterpret_cast<uintptr_t>(data) / kLarge * kLarge;
  const auto last = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes) - 1;
  const uintptr_t end = (last / kLarge + 1) * kLarge;
  (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

// Whether the system has given memory for an address already.
inline bool has_pages(const void* data) {
#if defined(__linux__)
  static const auto kPage = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) / kPage * kPage);
  unsigned char found = 1;
  return mincore(page, 1, &found) != 0 || (found & 1) != 0;
#else
  (void)data;
  return true;
#endif
}

// Has the system map all code of the library that this is part of, which it else reads from its file
// page by page on first touch: then the first call of a kernel waits for nothing. Failing is no fault.
inline void read_code() {
#if defined(__linux__)
  const auto find = [](dl_phdr_info* library, size_t, void* code) {
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const auto& part = library->dlpi_phdr[i];
      const uintptr_t begin = library->dlpi_addr + part.p_vaddr;
      const bool is_code = part.p_type == PT_LOAD && (part.p_flags & PF_X) != 0;
      if (!is_code || reinterpret_cast<uintptr_t>(code) - begin >= part.p_memsz) continue;
      const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
      const uintptr_t first = begin / page * page;
      const size_t bytes = begin + part.p_memsz - first;
      constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack
      if (madvise(reinterpret_cast<void*>(first), bytes, kPopulateRead) != 0) {
        // Before Linux 5.14: into the system's cache of files at least.
        (void)madvise(reinterpret_cast<void*>(first), bytes, MADV_WILLNEED);
      }
      return 1;
    }
    return 0;
  };
  dl_iterate_phdr(find, reinterpret_cast<void*>(&read_code));
#endif
}

}  // namespace jaxtap

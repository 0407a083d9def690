// Large pages for results: contents stay, and what is there is told apart.
#include "common/pages.h"

#include <cstring>

#include "tests/check.h"

#if defined(__linux__)
#include <sys/mman.h>

namespace {

using namespace jaxtap;

TEST(memory_that_large_pages_are_asked_for_keeps_its_contents) {
  constexpr int64_t kBytes = int64_t{5} << 20;
  void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED);
  auto* bytes = static_cast<unsigned char*>(mapped);
  bytes[100] = 7;
  CHECK(has_pages(bytes + 101));
  // Odd ends, at which what isn't mapped may follow; too few bytes.
  ask_for_large_pages(bytes + 3, kBytes - 5);
  ask_for_large_pages(bytes, 10);
  CHECK(bytes[100] == 7);
  bool zeros = true;
  for (int64_t i = 0; i < kBytes; ++i) zeros = zeros && (i == 100 || bytes[i] == 0);
  CHECK(zeros);
  std::memset(mapped, 1, kBytes);
  CHECK(has_pages(bytes + kBytes - 1));
  munmap(mapped, kBytes);
}

TEST(memory_that_nobody_touched_has_no_pages) {
  constexpr int64_t kBytes = int64_t{1} << 16;
  void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED);
  CHECK(!has_pages(static_cast<char*>(mapped) + kBytes / 2));
  munmap(mapped, kBytes);
}

}  // namespace
#endif

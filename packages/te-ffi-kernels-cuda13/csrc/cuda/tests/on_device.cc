#include "cuda/tests/on_device.h"

#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "cuda/tests/device_calls.h"
#include "tests/check.h"

namespace jaxtap::cuda::on_device {
namespace {

// What the heap has, and kernels have used.
struct Array {
  size_t size = 0;
  unsigned char* device = nullptr;  // a copy of exactly that size
  unsigned char* known = nullptr;   // the bytes that both had after the last copy
};

// Of the registry itself, which `operator new` below writes to.
template <typename T>
struct Malloc {
  using value_type = T;
  Malloc() = default;
  template <typename U>
  Malloc(const Malloc<U>&) {}  // NOLINT: conversions are what it's for
  T* allocate(size_t count) { return static_cast<T*>(std::malloc(count * sizeof(T))); }
  void deallocate(T* address, size_t) { std::free(address); }
  template <typename U>
  bool operator==(const Malloc<U>&) const {
    return true;
  }
  template <typename U>
  bool operator!=(const Malloc<U>&) const {
    return false;
  }
};

using Entry = std::pair<const uintptr_t, Array>;  // the address on the host, and the rest

struct Registry {
  std::mutex lock;
  std::map<uintptr_t, Array, std::less<>, Malloc<Entry>> arrays;
};

// Made at the first allocation, before other static objects, and there after them.
Registry& registry() {
  alignas(Registry) static unsigned char place[sizeof(Registry)];
  static auto* made = new (place) Registry;
  return *made;
}

void add(void* address, size_t size) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.lock);
  all.arrays[reinterpret_cast<uintptr_t>(address)].size = size;
}

// The end of an array counts as its own: what is there is empty.
Entry* array_at(uintptr_t address) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.lock);
  auto found = all.arrays.upper_bound(address);
  if (found == all.arrays.begin()) return nullptr;
  --found;
  return address - found->first <= found->second.size ? &*found : nullptr;
}

// An array without bytes: an address where none may be read, and which isn't nullptr, since that
// means to kernels that there is no array.
unsigned char* nowhere() { return reinterpret_cast<unsigned char*>(uintptr_t{4096}); }

// The kernel of the last launch. Asked for before it runs: after some errors CUDA doesn't say.
std::string& kernel_name() {
  static auto* name = new std::string("no kernel");
  return *name;
}

std::string kernel_text() {
  int status = 0;
  char* readable = abi::__cxa_demangle(kernel_name().c_str(), nullptr, nullptr, &status);
  const std::string text = status == 0 ? readable : kernel_name();
  std::free(readable);
  return text;
}

void need(int code, const char* what) {
  if (code == 0) return;
  std::printf("\n%s: %s failed: %s\nThe last kernel: %s\n", testing::running().name, what,
              text_of(code).c_str(), kernel_text().c_str());
  std::printf("What follows can't be tested: after such an error CUDA runs nothing.\n");
  std::fflush(nullptr);
  std::_Exit(3);
}

void forget_copy(Array& array) {
  if (array.device != nullptr && array.size != 0) need(release(array.device), "freeing memory");
  std::free(array.known);
  array.device = array.known = nullptr;
}

void remove(void* address) {
  if (address == nullptr) return;
  Registry& all = registry();
  Array gone;
  {
    std::lock_guard<std::mutex> hold(all.lock);
    const auto found = all.arrays.find(reinterpret_cast<uintptr_t>(address));
    if (found != all.arrays.end()) {
      gone = found->second;
      all.arrays.erase(found);
    }
  }
  // Not with the lock: CUDA may allocate and free.
  forget_copy(gone);
  std::free(address);
}

// Addresses of the stack, of static objects and of what is freed would be read as they are: on a
// GPU that fails, or worse, doesn't. Small numbers aren't addresses, nor what is beyond: the
// sanitizers' and CUDA's own.
bool is_of_host(uintptr_t word) {
  if (word < uintptr_t{1} << 45) return false;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(word / page * page), 1, &resident) == 0;
}

// The line of the process's map that has an address: "7ffd...-7ffe... rw-p ... [stack]".
std::string mapping_of(uintptr_t address) {
  std::string found = "no mapping";
  char line[512];
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  while (maps != nullptr && std::fgets(line, sizeof(line), maps) != nullptr) {
    unsigned long begin = 0, end = 0;
    if (std::sscanf(line, "%lx-%lx", &begin, &end) != 2) continue;
    if (address < begin || address >= end) continue;
    found = line;
    found.pop_back();  // the end of the line
  }
  if (maps != nullptr) std::fclose(maps);
  return found;
}

[[noreturn]] void refuse(uintptr_t address, size_t at) {
  std::printf("\n%s: what a kernel is given has at byte %zu an address of the host, %#lx,\n"
              "which is in no array of the heap, but here: %s\n"
              "Put what is there into a Buffer or a std::vector. The kernel: %s\n",
              testing::running().name, at, static_cast<unsigned long>(address),
              mapping_of(address).c_str(), kernel_text().c_str());
  std::fflush(nullptr);
  std::abort();
}

void remember(Array& array, const void* host) {
  if (array.known == nullptr) array.known = static_cast<unsigned char*>(std::malloc(array.size));
  std::memcpy(array.known, host, array.size);
}

// What the host has changed since the last copy, in parts: the rest may be unwritten on the device.
void update(const Array& array, const unsigned char* host) {
  constexpr size_t kPart = 256;
  const auto changed = [&](size_t at) {
    return at < array.size &&
           std::memcmp(host + at, array.known + at, std::min(kPart, array.size - at)) != 0;
  };
  for (size_t at = 0; at < array.size; at += kPart) {
    const size_t begin = at;
    while (changed(at)) at += kPart;
    if (at == begin) continue;
    const size_t count = std::min(at, array.size) - begin;
    need(upload(array.device + begin, host + begin, count), "copying to the device");
  }
}

void bring(Entry& entry) {
  Array& array = entry.second;
  const auto* host = reinterpret_cast<const unsigned char*>(entry.first);
  if (array.size == 0) {
    array.device = nowhere();
    return;
  }
  if (array.device == nullptr) {
    void* address = nullptr;
    need(allocate(&address, array.size), "allocating memory");
    array.device = static_cast<unsigned char*>(address);
  }
  if (array.known == nullptr) {
    need(upload(array.device, host, array.size), "copying to the device");
  } else {
    update(array, host);
  }
}

void begin() {
  std::printf("\non %s\n%-56s ", name_of_device().c_str(), testing::running().name);
  // As long as something is there, the driver keeps the pages of small arrays, which come and go.
  static void* first = nullptr;
  need(allocate(&first, 256), "allocating memory");
}

}  // namespace

void launch(const void* kernel, void* args, size_t size, const std::function<int()>& start) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> hold(one_at_a_time);
  static std::once_flag first;
  std::call_once(first, begin);
  ++testing::launches();
  kernel_name() = name_of(kernel);
  std::vector<Entry*> used;
  auto* bytes = static_cast<unsigned char*>(args);
  for (size_t at = 0; at + sizeof(uintptr_t) <= size; at += sizeof(uintptr_t)) {
    uintptr_t word;
    std::memcpy(&word, bytes + at, sizeof(word));
    Entry* found = array_at(word);
    if (found == nullptr) {
      if (is_of_host(word)) refuse(word, at);
      continue;
    }
    if (std::find(used.begin(), used.end(), found) == used.end()) {
      bring(*found);
      used.push_back(found);
    }
    const unsigned char* there = found->second.device + (word - found->first);
    std::memcpy(bytes + at, &there, sizeof(there));
  }
  const int code = start();
  if (code != 0) {
    // Such as too many registers: other kernels run on.
    clear_error();
    testing::check(false, __FILE__, __LINE__,
                   "launching " + kernel_text() + ": " + text_of(code));
    return;
  }
  need(wait(), "running a kernel");
  for (Entry* entry : used) {
    Array& array = entry->second;
    if (array.size == 0) continue;
    auto* host = reinterpret_cast<unsigned char*>(entry->first);
    need(download(host, array.device, array.size), "copying from the device");
    remember(array, host);
  }
}

void mark_unwritten(const void* address) {
  static const bool wanted = [] {
    const char* value = std::getenv("JAXTAP_UNWRITTEN");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  Entry* entry = wanted ? array_at(reinterpret_cast<uintptr_t>(address)) : nullptr;
  if (entry == nullptr || entry->second.size == 0) return;
  // Memory that was written once stays so to initcheck: the next kernel gets other.
  forget_copy(entry->second);
  remember(entry->second, reinterpret_cast<const void*>(entry->first));
}

void mark_written(const void* address, size_t size) {
  Entry* entry = array_at(reinterpret_cast<uintptr_t>(address));
  if (entry == nullptr || entry->second.known == nullptr) return;
  const auto* host = static_cast<const unsigned char*>(address);
  unsigned char* known = entry->second.known + (reinterpret_cast<uintptr_t>(host) - entry->first);
  for (size_t i = 0; i < size; ++i) known[i] = static_cast<unsigned char>(~host[i]);
}

namespace {

// Subnormal float32 numbers count as zero on the device (-ftz=true), and on the threads of XLA that
// the CPU's kernels run on: so they do for those that the tests call. Not in a rehearsal, whose
// kernels keep them.
#if defined(__x86_64__) && !defined(JAXTAP_REHEARSED)
[[maybe_unused]] const bool flushes = (_mm_setcsr(_mm_getcsr() | 0x8040), true);
#endif

void* allocated(size_t size, size_t alignment) {
  void* address = alignment <= alignof(std::max_align_t)
                      ? std::malloc(size)
                      : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (address == nullptr) throw std::bad_alloc();
  add(address, size);
  return address;
}

}  // namespace
}  // namespace jaxtap::cuda::on_device

// Every allocation of the process by C++, with its size. Arrays, too: AddressSanitizer has its own
// of both.
using jaxtap::cuda::on_device::allocated;
using jaxtap::cuda::on_device::remove;

void* operator new(size_t size) { return allocated(size, 1); }
void* operator new[](size_t size) { return allocated(size, 1); }
void* operator new(size_t size, std::align_val_t to) {
  return allocated(size, static_cast<size_t>(to));
}
void* operator new[](size_t size, std::align_val_t to) {
  return allocated(size, static_cast<size_t>(to));
}
void operator delete(void* address) noexcept { remove(address); }
void operator delete[](void* address) noexcept { remove(address); }
void operator delete(void* address, size_t) noexcept { remove(address); }
void operator delete[](void* address, size_t) noexcept { remove(address); }
void operator delete(void* address, std::align_val_t) noexcept { remove(address); }
void operator delete[](void* address, std::align_val_t) noexcept { remove(address); }
void operator delete(void* address, size_t, std::align_val_t) noexcept { remove(address); }
void operator delete[](void* address, size_t, std::align_val_t) noexcept { remove(address); }

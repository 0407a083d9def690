// Tests as functions that register themselves, and checks that count.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace jaxtap::testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline long& checks() {
  static long count = 0;
  return count;
}

inline long& failures() {
  static long count = 0;
  return count;
}

// Of CUDA kernels, where tests run them on a device.
inline long& launches() {
  static long count = 0;
  return count;
}

// The test that runs, how many checks had failed before it, and the cases it has come to.
struct Running {
  const char* name = "no test";
  long failures = 0, cases = 0;
};
inline Running& running() {
  static Running now;
  return now;
}

// Whether a test shall take the case it has come to. With JAXTAP_CASES=N in the environment every
// Nth is taken, for tools that make each one slow: of a prime, some of all sizes and dtypes. Tests
// ask once for each case, before they allocate for it.
inline bool takes_case() {
  static const long every = [] {
    const char* value = std::getenv("JAXTAP_CASES");
    return value == nullptr || std::atol(value) < 1 ? 1 : std::atol(value);
  }();
  return running().cases++ % every == 0;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline bool check(bool holds, const char* file, int line, const std::string& what) {
  ++checks();
  if (holds) return true;
  // Some of each test: the others say the same.
  if (++failures() - running().failures > 20) return false;
  std::printf("\n%s:%d: failed: %s", file, line, what.c_str());
  std::fflush(stdout);
  return false;
}

// Whether `part` is in `text`. "..." stands for anything: "k must ... got 3".
inline bool contains(const std::string& text, const std::string& part) {
  size_t at = 0, from = 0;
  for (size_t to = 0; to != std::string::npos; from = to + 3) {
    to = part.find("...", from);
    const std::string one = part.substr(from, to == std::string::npos ? to : to - from);
    at = text.find(one, at);
    if (at == std::string::npos) return false;
    at += one.size();
  }
  return true;
}

// Whether `body` throws an Error whose message contains `part`.
template <typename Error>
bool throws(const std::function<void()>& body, const std::string& part) {
  try {
    body();
  } catch (const Error& error) {
    const bool found = contains(error.what(), part);
    if (!found) std::printf("threw \"%s\", without \"%s\"\n", error.what(), part.c_str());
    return found;
  }
  std::printf("threw nothing; \"%s\" was expected\n", part.c_str());
  return false;
}

}  // namespace jaxtap::testing

#define TEST(name)                                                          \
  static void name();                                                       \
  static const ::jaxtap::testing::Registration registration_##name{#name, name}; \
  static void name()
#define CHECK(condition) \
  ::jaxtap::testing::check(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_THAT(condition, what) \
  ::jaxtap::testing::check(static_cast<bool>(condition), __FILE__, __LINE__, (what))

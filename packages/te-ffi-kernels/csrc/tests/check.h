// Tests as functions that register themselves, and checks that count.
#pragma once

#include <cstdio>
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

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline bool check(bool holds, const char* file, int line, const std::string& what) {
  ++checks();
  if (holds) return true;
  if (++failures() <= 20) std::printf("%s:%d: failed: %s\n", file, line, what.c_str());
  return false;
}

// Whether `body` throws an Error whose message has `part` in it.
template <typename Error>
bool throws(const std::function<void()>& body, const std::string& part) {
  try {
    body();
  } catch (const Error& error) {
    const bool found = std::string(error.what()).find(part) != std::string::npos;
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

// Runs all tests, or those whose names contain an argument. With --list, prints their names; with
// --isas, what JAXTAP_ISA can be here.
#include <chrono>
#include <cstring>
#include <exception>

#include "common/isa.h"
#include "tests/check.h"

namespace {

using namespace jaxtap::testing;

void run(const Test& test) {
  const long checked = checks(), launched = launches();
  running() = {test.name, failures(), 0};
  // Whoever ends the process before the test does leaves its name.
  std::printf("%-56s ", test.name);
  std::fflush(stdout);
  const auto begin = std::chrono::steady_clock::now();
  try {
    test.run();
  } catch (const std::exception& error) {
    check(false, __FILE__, __LINE__, std::string("the test threw: ") + error.what());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const long failed = failures() - running().failures;
  if (failed != 0) std::printf("\n%-56s ", test.name);
  std::printf("%8ld checks, %ld failed, %.2f s", checks() - checked, failed, took.count());
  if (launches() != launched) std::printf(", %ld launches", launches() - launched);
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--isas") == 0) {
    for (jaxtap::Isa isa : jaxtap::available_isas()) std::printf("%s\n", jaxtap::name(isa));
    return 0;
  }
  const bool lists = argc == 2 && std::strcmp(argv[1], "--list") == 0;
  int ran = 0, failed = 0;
  for (const Test& test : tests()) {
    bool wanted = argc == 1 || lists;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    ++ran;
    if (lists) {
      std::printf("%s\n", test.name);
    } else {
      const long before = failures();
      run(test);
      failed += failures() != before;
    }
  }
  if (ran == 0) std::printf("no test has such a name\n");
  if (!lists) std::printf("%d passed, %d failed\n", ran - failed, failed);
  if (launches() != 0) std::printf("%ld launches of kernels\n", launches());
  return ran == 0 || failures() != 0;
}

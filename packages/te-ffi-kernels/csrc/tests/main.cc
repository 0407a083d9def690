// Runs all tests, or those whose names contain an argument. With --isas, prints what JAXTAP_ISA can
// be here.
#include <cstring>

#include "common/isa.h"
#include "tests/check.h"

int main(int argc, char** argv) {
  using namespace jaxtap::testing;
  if (argc == 2 && std::strcmp(argv[1], "--isas") == 0) {
    for (jaxtap::Isa isa : jaxtap::available_isas()) std::printf("%s\n", jaxtap::name(isa));
    return 0;
  }
  int ran = 0;
  for (const Test& test : tests()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    const long before = failures(), checked = checks();
    test.run();
    std::printf("%-32s %8ld checks, %ld failed\n", test.name, checks() - checked,
                failures() - before);
    ++ran;
  }
  if (ran == 0) std::printf("no test has such a name\n");
  return ran == 0 || failures() != 0;
}

// What fakes of NVIDIA's libraries have alike: they count calls, know what there is of their
// objects, and fail when they're told to.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cuda/tests/fake_runtime.h"

namespace jaxtap::testing {

class FakeLibrary {
 public:
  std::vector<Fault> faults;
  std::vector<std::string> calls;
  std::vector<int> failed;  // statuses that were returned, in order
  int misused = 0;          // objects that there weren't, and calls that would be refused

  int count(const std::string& name) const {
    int found = 0;
    for (const std::string& call : calls) found += call == name;
    return found;
  }

  static std::string said_of(int status) { return "fake status " + std::to_string(status); }

 protected:
  struct Nothing {};

  template <typename Key, typename Value>
  Value& add(std::map<Key, Value>& all, Key* place) {
    *place = reinterpret_cast<Key>(static_cast<intptr_t>(++made_ * 16));
    return all[*place];
  }
  template <typename Key, typename Value>
  void remove(std::map<Key, Value>& all, Key key) {
    misused += all.erase(key) == 0;  // gone with the call, even with one that fails
  }

  template <typename Do>
  int call(const char* name, Do&& work) {
    const int number = static_cast<int>(calls.size());
    calls.push_back(name);
    for (const Fault& fault : faults) {
      if (fault.call != number) continue;
      if (fault.late) work();
      failed.push_back(fault.code);
      return fault.code;
    }
    work();
    return 0;
  }

 private:
  int made_ = 0;
};

}  // namespace jaxtap::testing

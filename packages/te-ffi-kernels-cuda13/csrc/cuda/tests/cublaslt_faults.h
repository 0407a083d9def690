// Matmuls of cuBLASLt that fail.
#pragma once

#include <string>

#include "cuda/tests/fake_cublaslt.h"
#include "tests/check.h"

namespace jaxtap::testing {

// Calls on_device(library, handle) with faults at each call, and at one that follows: no object is
// left, none is used that there isn't, and the first failure is what is told.
template <class OnDevice>
void with_a_fault_at_each_call(const std::string& label, OnDevice&& on_device) {
  FakeCublasLt counted;
  {
    cuda::OwnedHandle handle(counted);
    counted.create(handle.place());
    on_device(counted, handle.get());
  }
  // The handle comes first; in the end objects are destroyed, which nothing can be told of.
  const int all = static_cast<int>(counted.calls.size());
  int told = 0;
  for (bool late : {false, true}) {
    for (int one = 1; one < all; ++one) {
      for (int two = one; two < all; two += 3) {
        FakeCublasLt lt;
        lt.faults = {{one, 100 + one, late}, {two, 100 + two, late}};
        std::string error;
        {
          cuda::OwnedHandle handle(lt);
          lt.create(handle.place());
          try {
            on_device(lt, handle.get());
          } catch (const cuda::CudaError& thrown) {
            error = thrown.what();
          }
        }
        const std::string what = label + ", faults at calls " + std::to_string(one) + " and " +
                                 std::to_string(two) + ": " + error;
        CHECK_THAT(lt.left() == 0 && lt.misused == 0, what);
        told += !error.empty();
        if (lt.failed.empty()) continue;
        const std::string& first = lt.calls[static_cast<size_t>(lt.failed[0] - 100)];
        if (first.find("destroy") == 0) continue;
        CHECK_THAT(error.find(FakeLibrary::said_of(lt.failed[0])) != std::string::npos, what);
      }
    }
  }
  CHECK(told > all);
}

}  // namespace jaxtap::testing

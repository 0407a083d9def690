// The same tests where kernels can't read the memory of the host: on a GPU (JAXTAP_ON_DEVICE, with
// kernels that nvcc compiled), or rehearsed, with kernels in software on copies (JAXTAP_REHEARSED
// besides). Arrays of tests stay where they are: each launch copies them to memory of the device of
// exactly their size, and back, so that what tests and their libraries in memory do with them in
// between needs no change.
#pragma once

#include <cstddef>
#include <functional>

namespace jaxtap::cuda::on_device {

// Puts addresses of the device for those of arrays in `args`, the struct of a kernel, whose padding
// is zeros; then calls `start`, which returns CUDA's error code, and waits. Ends the process with
// status 3 where CUDA fails for good, and aborts at an address of the host that isn't one of an
// array from the heap.
void launch(const void* kernel, void* args, size_t size, const std::function<int()>& start);

// Nothing in the array at `address` may be read before it's written. With JAXTAP_UNWRITTEN=1 in the
// environment it isn't copied to the device, so that compute-sanitizer's initcheck can tell.
void mark_unwritten(const void* address);

// A library in memory wrote these bytes, which are copied at the next launch whatever they are: what
// the host holds of memory that no kernel wrote is by chance, and may be the same.
void mark_written(const void* address, size_t size);

}  // namespace jaxtap::cuda::on_device

// The handlers of the plugins in test_ffi.py: good ones, and ones with a fault each.
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

#define HANDLER(name, impl)            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(       \
      name, impl,                      \
      ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Attr<float>("factor"))

static void ScaleFirst(size_t count, const float* x, float* y, float factor) {
  for (size_t i = 0; i < count; ++i) y[i] = factor * x[i];
}

static ffi::Error Scale(F32 x, Result y, float factor) {
  if (x.element_count() != y->element_count()) {
    return ffi::Error::InvalidArgument("acme.scale: x and the result differ in size");
  }
  ScaleFirst(x.element_count(), x.typed_data(), y->typed_data(), factor);
  return ffi::Error::Success();
}
HANDLER(AcmeScale, Scale);

// Leaves out what is beyond the seventh element.
static ffi::Error Short(F32 x, Result y, float factor) {
  size_t count = x.element_count();
  ScaleFirst(count, x.typed_data(), y->typed_data(), factor);
  if (count > 7) y->typed_data()[count - 1] = 0;
  return ffi::Error::Success();
}
HANDLER(AcmeShort, Short);

// Is right the first time.
static ffi::Error Stale(F32 x, Result y, float factor) {
  static int calls = 0;
  ScaleFirst(x.element_count(), x.typed_data(), y->typed_data(), factor + calls++);
  return ffi::Error::Success();
}
HANDLER(AcmeStale, Stale);

// Repeats the first row instead of computing the others.
static ffi::Error OneRow(F32 x, Result y, float factor) {
  size_t row = x.dimensions().size() < 2 ? x.element_count() : x.dimensions().back();
  for (size_t i = 0; i < y->element_count(); ++i) {
    y->typed_data()[i] = factor * x.typed_data()[i % row];
  }
  return ffi::Error::Success();
}
HANDLER(AcmeOneRow, OneRow);

// Takes an operand of any dtype for one of float32.
static ffi::Error Careless(ffi::AnyBuffer x, Result y, float factor) {
  ScaleFirst(y->element_count(), static_cast<float*>(x.untyped_data()), y->typed_data(), factor);
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    AcmeCareless, Careless,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<F32>().Attr<float>("factor"));

static ffi::Error Throws(F32 x, Result y, float factor) {
  throw std::runtime_error("acme.throws: out of luck");
}
HANDLER(AcmeThrows, Throws);

// Writes which version of the FFI the runtime says that it is of.
extern "C" XLA_FFI_Error* AcmeVersion(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      ffi::Ffi::Bind()
          .Ret<ffi::Buffer<ffi::S32>>()
          .To([](ffi::ResultBuffer<ffi::S32>) { return ffi::Error::Success(); })
          .release();
  if (frame->rets.size == 1) {
    auto* result = static_cast<XLA_FFI_Buffer*>(frame->rets.rets[0]);
    auto* version = static_cast<int32_t*>(result->data);
    version[0] = frame->api->api_version.major_version;
    version[1] = frame->api->api_version.minor_version;
  }
  return handler->Call(frame);
}

struct Counter {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  int32_t calls = 0;
};
ffi::TypeId Counter::id = {};
ffi::TypeInfo Counter::info = ffi::MakeTypeInfo<Counter>();

static ffi::ErrorOr<std::unique_ptr<Counter>> NewCounter() { return std::make_unique<Counter>(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(AcmeCountNew, NewCounter, ffi::Ffi::BindInstantiate());

static ffi::Error Count(Counter* counter, ffi::ResultBuffer<ffi::S32> y) {
  *y->typed_data() = ++counter->calls;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    AcmeCount, Count, ffi::Ffi::Bind().Ctx<ffi::State<Counter>>().Ret<ffi::Buffer<ffi::S32>>());

extern "C" XLA_FFI_TypeId* AcmeCounterId() { return &Counter::id; }
extern "C" XLA_FFI_TypeInfo* AcmeCounterInfo() { return &Counter::info; }
extern "C" int AcmeFfiMajor() { return XLA_FFI_API_MAJOR; }
extern "C" int AcmeFfiMinor() { return XLA_FFI_API_MINOR; }

#include "ffi/call.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "common/packed.h"
#include "common/pages.h"
#include "common/spin_workers.h"

namespace jaxtap::ffi {
namespace {

XLA_FFI_Error* ErrorOf(const XLA_FFI_Api& api, const Failure& failure) {
  if (failure.code == XLA_FFI_Error_Code_OK) return nullptr;
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = failure.message.c_str();
  args.errc = failure.code;
  return api.XLA_FFI_Error_Create(&args);
}

void Destroy(const XLA_FFI_Api& api, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args = {};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = error;
  api.XLA_FFI_Error_Destroy(&args);
}

// Newer ones are longer.
void NeedStruct(const char* name, size_t size, size_t least) {
  if (size < least) {
    throw failed_precondition(name, " must have at least ", least, " bytes, got ", size,
                              ". Install a newer jaxlib.");
  }
}

// Whether XLA asks what the handler was built for, instead of calling it; then it is told.
bool TellsMetadata(const XLA_FFI_CallFrame& frame) {
  const XLA_FFI_Extension_Base* asked = frame.extension_start;
  if (asked == nullptr || asked->type != XLA_FFI_Extension_Metadata) return false;
  NeedStruct("XLA_FFI_Metadata_Extension", asked->struct_size,
             XLA_FFI_Metadata_Extension_STRUCT_SIZE);
  XLA_FFI_Metadata& metadata =
      *reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame.extension_start)->metadata;
  NeedStruct("XLA_FFI_Metadata", metadata.struct_size, XLA_FFI_Metadata_STRUCT_SIZE);
  metadata.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                          XLA_FFI_API_MINOR};
  metadata.traits = 0;
  // There is no state.
  if (metadata.struct_size >= offsetof(XLA_FFI_Metadata, state_type_id) + sizeof(XLA_FFI_TypeId)) {
    metadata.state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
  }
  return true;
}

template <typename Work>
XLA_FFI_Error* Run(XLA_FFI_CallFrame& frame, const char* target, XLA_FFI_ExecutionStage stage,
                   const Work& work) {
  return ErrorOf(*frame.api, Guarded(target, [&] {
    NeedStruct("XLA_FFI_CallFrame", frame.struct_size, XLA_FFI_CallFrame_STRUCT_SIZE);
    if (TellsMetadata(frame)) return;
    if (frame.stage != stage) {
      throw invalid_argument("the stage must be ", static_cast<int>(stage), ", got ",
                             static_cast<int>(frame.stage), ". Register each handler for its own.");
    }
    work();
  }));
}

}  // namespace

int64_t Attributes::Find(const char* name) const {
  const size_t length = std::strlen(name);
  for (int64_t i = 0; i < attributes_->size; ++i) {
    const XLA_FFI_ByteSpan& found = *attributes_->names[i];
    if (found.len == length && std::memcmp(found.ptr, name, length) == 0) return i;
  }
  return -1;
}

template <typename T>
std::optional<T> Attributes::Scalar(const char* name, XLA_FFI_DataType dtype) const {
  const int64_t i = Find(name);
  if (i < 0 || attributes_->types[i] != XLA_FFI_AttrType_SCALAR) return std::nullopt;
  const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(attributes_->attrs[i]);
  if (scalar.dtype != dtype) return std::nullopt;
  T value;
  std::memcpy(&value, scalar.value, sizeof(value));
  return value;
}

template <>
std::optional<int64_t> Attributes::get(const char* name) const {
  return Scalar<int64_t>(name, XLA_FFI_DataType_S64);
}

template <>
std::optional<double> Attributes::get(const char* name) const {
  return Scalar<double>(name, XLA_FFI_DataType_F64);
}

template <>
std::optional<float> Attributes::get(const char* name) const {
  return Scalar<float>(name, XLA_FFI_DataType_F32);
}

template <>
std::optional<bool> Attributes::get(const char* name) const {
  return Scalar<bool>(name, XLA_FFI_DataType_PRED);
}

template <>
std::optional<Attributes> Attributes::get(const char* name) const {
  const int64_t i = Find(name);
  if (i < 0 || attributes_->types[i] != XLA_FFI_AttrType_DICTIONARY) return std::nullopt;
  return Attributes(*static_cast<const XLA_FFI_Attrs*>(attributes_->attrs[i]));
}

void Call::NeedCounts(int64_t operands, int64_t results) const {
  if (frame_.args.size != operands || frame_.rets.size != results) {
    throw invalid_argument("there are ", frame_.args.size, " operands and ", frame_.rets.size,
                           " results, and there must be ", operands, " and ", results);
  }
}

Array Call::Operand(int64_t index, const char* name) const {
  if (frame_.args.types[index] != XLA_FFI_ArgType_BUFFER) {
    throw invalid_argument(name, " must be a buffer");
  }
  return Read(name, *static_cast<const XLA_FFI_Buffer*>(frame_.args.args[index]));
}

Array Call::Result(int64_t index, const char* name) const {
  if (frame_.rets.types[index] != XLA_FFI_RetType_BUFFER) {
    throw invalid_argument(name, " must be a buffer");
  }
  const Array result = Read(name, *static_cast<const XLA_FFI_Buffer*>(frame_.rets.rets[index]));
  ask_for_large_pages(result.data, result.size() * static_cast<int64_t>(byte_size(result.dtype)));
  return result;
}

namespace {

// Whether XLA's pool has run a task on this thread: then it is of that pool, which runs the program's
// operations and is awake.
thread_local bool on_xla_pool = false;

// A call after which others are worth staying awake for.
constexpr std::chrono::microseconds kShort(100);

}  // namespace

XlaScheduler::XlaScheduler(const Call& call) : frame_(call.frame_) {
  int64_t threads = 0;
  XLA_FFI_ThreadPool_NumThreads_Args args = {};
  args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  args.ctx = frame_.ctx;
  args.num_threads = &threads;
  XLA_FFI_Error* error = frame_.api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error != nullptr) Destroy(*frame_.api, error);  // no pool: no threads
  threads_ = static_cast<int>(threads);
}

XlaScheduler::~XlaScheduler() {
  if (begin_ == Clock::time_point() || on_xla_pool || Clock::now() - begin_ > kShort) return;
  expect_tasks(threads_);
}

void XlaScheduler::schedule(std::function<void()> task) {
  if (begin_ == Clock::time_point()) begin_ = Clock::now();
  if (!on_xla_pool && run_on_worker(task)) return;
  XLA_FFI_ThreadPool_Schedule_Args args = {};
  args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
  args.ctx = frame_.ctx;
  args.task = [](void* data) {
    on_xla_pool = true;
    auto* owned = static_cast<std::function<void()>*>(data);
    (*owned)();
    delete owned;
  };
  args.data = new std::function<void()>(std::move(task));
  XLA_FFI_Error* error = frame_.api->XLA_FFI_ThreadPool_Schedule(&args);
  if (error == nullptr) return;
  Destroy(*frame_.api, error);
  args.task(args.data);
}

namespace {

// What the first call of any kernel would wait for. Throws for an instruction set that can't be.
void WarmUp() {
  selected_isa();  // for AMX, this asks the system for permission
  [[maybe_unused]] static const bool once = [] {
    read_code();
    warm_panel_checks();
    return true;
  }();
}

}  // namespace

XLA_FFI_Error* RunInstantiate(XLA_FFI_CallFrame* frame, const char* target,
                              void (*read)(const Attributes&)) {
  return Run(*frame, target, XLA_FFI_ExecutionStage_INSTANTIATE, [&] {
    read(Attributes(frame->attrs));
    WarmUp();
    CountWarm(target);
  });
}

XLA_FFI_Error* RunExecute(XLA_FFI_CallFrame* frame, const char* target,
                          void (*run)(const Call&, const Parallel&)) {
  return Run(*frame, target, XLA_FFI_ExecutionStage_EXECUTE, [&] {
    const Call call(*frame);
    XlaScheduler scheduler(call);
    run(call, Parallel(scheduler));
  });
}

}  // namespace jaxtap::ffi

// XLA's side of its FFI, in memory: buffers that end where their allocation ends, attributes,
// errors, and a pool of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/parallel.h"
#include "ffi/buffers.h"
#include "ffi/registry.h"
#include "tests/check.h"
#include "xla/ffi/api/c_api.h"

// XLA's own, which its interface doesn't show.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};
struct XLA_FFI_ExecutionContext {
  jaxtap::Threads* pool;  // or none
};

namespace jaxtap::testing {

constexpr XLA_FFI_DataType kDtypes[] = {
    XLA_FFI_DataType_F64,    XLA_FFI_DataType_F32,    XLA_FFI_DataType_BF16,
    XLA_FFI_DataType_F16,    XLA_FFI_DataType_F8E5M2, XLA_FFI_DataType_F8E4M3FN,
    XLA_FFI_DataType_F8E8M0FNU, XLA_FFI_DataType_S64, XLA_FFI_DataType_S32,
    XLA_FFI_DataType_S16,    XLA_FFI_DataType_S8,     XLA_FFI_DataType_U64,
    XLA_FFI_DataType_U32,    XLA_FFI_DataType_U16,    XLA_FFI_DataType_U8,
    XLA_FFI_DataType_PRED,   XLA_FFI_DataType_C64};

inline size_t bytes_of(XLA_FFI_DataType dtype) {
  return dtype == XLA_FFI_DataType_C64 ? 8 : byte_size(ffi::FromXla(dtype, ""));
}

struct Tensor {
  Tensor(XLA_FFI_DataType of, std::vector<int64_t> sizes) : dtype(of), dims(std::move(sizes)) {
    fit();
  }

  int64_t size() const {
    int64_t product = 1;
    for (int64_t dim : dims) product *= dim;
    return product;
  }

  // Gives it the bytes of its dtype and sizes; they repeat those it had.
  void fit() {
    std::vector<uint8_t> made(static_cast<size_t>(size()) * bytes_of(dtype));
    for (size_t i = 0; i < made.size() && !bytes.empty(); ++i) made[i] = bytes[i % bytes.size()];
    bytes = std::move(made);
  }

  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(bytes.data());
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.data());
  }

  XLA_FFI_DataType dtype;
  std::vector<int64_t> dims;
  std::vector<uint8_t> bytes;
  bool is_buffer = true;
};

struct Attribute;
using Dictionary = std::map<std::string, Attribute>;
struct Attribute {
  template <typename T>
  Attribute(T given) : value(std::move(given)) {}
  Attribute(int given) : value(int64_t{given}) {}

  std::variant<int64_t, double, float, bool, Dictionary> value;
};

// A call, as a program has it.
struct Program {
  std::string target;
  std::vector<Tensor> operands, results;
  Dictionary attributes;
};

struct Outcome {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;

  bool ok() const { return code == XLA_FFI_Error_Code_OK; }
  bool refused() const { return code == XLA_FFI_Error_Code_INVALID_ARGUMENT; }
  bool says(const std::string& part) const { return testing::contains(message, part); }
};

inline const XLA_FFI_Api& fake_api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->errc, args->message};
    };
    made.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    made.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) {
      Threads* const pool = args->ctx->pool;
      if (pool == nullptr) return new XLA_FFI_Error{XLA_FFI_Error_Code_UNIMPLEMENTED, "no pool"};
      *args->num_threads = pool->threads();
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    made.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
      args->ctx->pool->schedule([task = args->task, data = args->data] { task(data); });
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    return made;
  }();
  return api;
}

// The attributes of a program, as XLA passes them.
class Passed {
 public:
  explicit Passed(const Dictionary& dictionary) {
    for (const auto& [name, attribute] : dictionary) {
      spans_.push_back({name.data(), name.size()});
      std::visit([this](const auto& value) { Add(value); }, attribute.value);
    }
    for (XLA_FFI_ByteSpan& span : spans_) names_.push_back(&span);
    attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(names_.size()),
             types_.data(), names_.data(), values_.data()};
  }
  Passed(const Passed&) = delete;

  XLA_FFI_Attrs attrs;

 private:
  void Add(const Dictionary& dictionary) {
    types_.push_back(XLA_FFI_AttrType_DICTIONARY);
    values_.push_back(&inner_.emplace_back(dictionary).attrs);
  }
  void Add(const int64_t& value) { AddScalar(XLA_FFI_DataType_S64, &value); }
  void Add(const double& value) { AddScalar(XLA_FFI_DataType_F64, &value); }
  void Add(const float& value) { AddScalar(XLA_FFI_DataType_F32, &value); }
  void Add(const bool& value) { AddScalar(XLA_FFI_DataType_PRED, &value); }
  void AddScalar(XLA_FFI_DataType dtype, const void* value) {
    types_.push_back(XLA_FFI_AttrType_SCALAR);
    scalars_.push_back({dtype, const_cast<void*>(value)});
    values_.push_back(&scalars_.back());
  }

  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<Passed> inner_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
};

// Operands or results, as XLA passes them.
template <class Type, Type kBuffer>
struct Buffers {
  explicit Buffers(std::vector<Tensor>& tensors) : buffers(tensors.size()) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      Tensor& t = tensors[i];
      void* const data = t.bytes.empty() ? nullptr : t.bytes.data();
      buffers[i] = {XLA_FFI_Buffer_STRUCT_SIZE,          nullptr, t.dtype, data,
                    static_cast<int64_t>(t.dims.size()), t.dims.data()};
      types.push_back(t.is_buffer ? kBuffer : static_cast<Type>(0));
      addresses.push_back(&buffers[i]);
    }
  }

  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<Type> types;
  std::vector<void*> addresses;
};

inline const ffi::Target* target_of(const std::string& name) {
  for (const ffi::Target& target : ffi::Targets()) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

inline Outcome call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame& frame) {
  XLA_FFI_Error* const error = handler(&frame);
  if (error == nullptr) return {};
  Outcome outcome{error->code, error->message};
  delete error;
  return outcome;
}

// Runs a stage as XLA does. An instantiation has no operands and results.
inline Outcome run(Program& program, XLA_FFI_ExecutionStage stage, Threads* pool) {
  const ffi::Target& target = *target_of(program.target);
  const bool executes = stage == XLA_FFI_ExecutionStage_EXECUTE;
  const Passed attributes(program.attributes);
  std::vector<Tensor> none;
  Buffers<XLA_FFI_ArgType, XLA_FFI_ArgType_BUFFER> args(executes ? program.operands : none);
  Buffers<XLA_FFI_RetType, XLA_FFI_RetType_BUFFER> rets(executes ? program.results : none);
  XLA_FFI_ExecutionContext context{pool};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &fake_api();
  frame.ctx = &context;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.types.size()),
                args.types.data(), args.addresses.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.types.size()),
                rets.types.data(), rets.addresses.data()};
  frame.attrs = attributes.attrs;
  return call(executes ? target.execute : target.instantiate, frame);
}

// Both stages. The first error is the outcome.
inline Outcome run(Program& program, Threads* pool) {
  Outcome outcome = run(program, XLA_FFI_ExecutionStage_INSTANTIATE, pool);
  if (outcome.ok()) outcome = run(program, XLA_FFI_ExecutionStage_EXECUTE, pool);
  return outcome;
}

}  // namespace jaxtap::testing

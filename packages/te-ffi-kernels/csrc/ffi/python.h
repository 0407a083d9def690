// Values and functions of a Python module, on the C interface that all Pythons from 3.11 on share.
// The modules here have a few functions of numbers, strings and dictionaries: a library for
// bindings takes longer to compile than they do.

#pragma once

// Before all others, as Python wants it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace jaxtap::python {

// Thrown where Python has an exception set.
struct Raised {};

// A reference to an object that is owned.
class Object {
 public:
  explicit Object(PyObject* owned) : object_(owned) {
    if (owned == nullptr) throw Raised();
  }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

inline void Check(int code) {
  if (code < 0) throw Raised();
}

// C++ to Python.

inline Object ToPython(Object object) { return object; }
inline Object ToPython(int value) { return Object(PyLong_FromLong(value)); }
inline Object ToPython(int64_t value) { return Object(PyLong_FromLongLong(value)); }
inline Object ToPython(size_t value) { return Object(PyLong_FromSize_t(value)); }
inline Object ToPython(const char* text) { return Object(PyUnicode_FromString(text)); }
inline Object ToPython(const std::string& text) { return ToPython(text.c_str()); }

template <class... Values>
Object Tuple(Values&&... values) {
  return Object(PyTuple_Pack(sizeof...(values), ToPython(std::forward<Values>(values)).get()...));
}

inline Object Capsule(void* pointer) { return Object(PyCapsule_New(pointer, nullptr, nullptr)); }

template <class Result, class... Args>
Object Capsule(Result (*function)(Args...)) {
  return Capsule(reinterpret_cast<void*>(function));
}

class Dict : public Object {
 public:
  Dict() : Object(PyDict_New()) {}

  template <class Value>
  void set(const char* key, Value&& value) {
    Check(PyDict_SetItemString(get(), key, ToPython(std::forward<Value>(value)).get()));
  }
};

inline Object ToPython(const std::map<std::string, int64_t>& values) {
  Dict dict;
  for (const auto& [key, value] : values) dict.set(key.c_str(), value);
  return std::move(dict);
}

inline Object ToPython(const std::vector<std::string>& values) {
  Object list(PyList_New(0));
  for (const std::string& value : values) Check(PyList_Append(list.get(), ToPython(value).get()));
  return list;
}

// Python to C++. Throws for values of another type.

template <class T>
T FromPython(PyObject* object) {
  if constexpr (std::is_same_v<T, PyObject*>) {
    return object;
  } else if constexpr (std::is_same_v<T, bool>) {
    if (!PyBool_Check(object)) {
      PyErr_SetString(PyExc_TypeError, "an argument must be a bool");
      throw Raised();
    }
    return object == Py_True;
  } else if constexpr (std::is_integral_v<T>) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw Raised();
    if (static_cast<long long>(static_cast<T>(value)) != value) {
      PyErr_SetString(PyExc_OverflowError, "an argument is too large");
      throw Raised();
    }
    return static_cast<T>(value);
  } else if constexpr (std::is_same_v<T, double>) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred() != nullptr) throw Raised();
    return value;
  } else {
    static_assert(std::is_same_v<T, std::string>, "no such values are passed");
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) throw Raised();
    return std::string(text, static_cast<size_t>(size));
  }
}

// The items of a dictionary, with the `get` that configurations are made with.
struct Items {
  PyObject* dict;

  template <class T>
  std::optional<T> get(const char* name) const {
    PyObject* value = PyDict_GetItemString(dict, name);
    if (value == nullptr) return std::nullopt;
    try {
      return FromPython<T>(value);
    } catch (const Raised&) {
      PyErr_Clear();
      return std::nullopt;
    }
  }
};

// While it lives, other threads run Python.
class OthersRun {
 public:
  OthersRun() : state_(PyEval_SaveThread()) {}
  OthersRun(const OthersRun&) = delete;
  OthersRun& operator=(const OthersRun&) = delete;
  ~OthersRun() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Runs `body`, which returns an Object. No exception may pass Python's C interface.
template <class Body>
PyObject* Guarded(const Body& body) {
  try {
    return body().release();
  } catch (const Raised&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Result, class... Args, size_t... kIndex>
Object Apply(Result (*function)(Args...), [[maybe_unused]] PyObject* args,
             std::index_sequence<kIndex...>) {
  const std::tuple<std::decay_t<Args>...> values{
      FromPython<std::decay_t<Args>>(PyTuple_GetItem(args, static_cast<Py_ssize_t>(kIndex)))...};
  return ToPython(function(std::get<kIndex>(values)...));
}

template <class Result, class... Args>
PyObject* ApplyAll(Result (*function)(Args...), PyObject* args) {
  return Guarded([&] {
    constexpr auto kCount = static_cast<Py_ssize_t>(sizeof...(Args));
    if (PyTuple_Size(args) != kCount) {
      PyErr_Format(PyExc_TypeError, "there must be %zd arguments, got %zd", kCount,
                   PyTuple_Size(args));
      throw Raised();
    }
    return Apply(function, args, std::index_sequence_for<Args...>());
  });
}

// A function of the module. Its arguments are positional.
template <auto kFunction>
PyMethodDef Method(const char* name) {
  return {name, [](PyObject*, PyObject* args) { return ApplyAll(kFunction, args); }, METH_VARARGS,
          nullptr};
}

template <class Value>
void SetAttribute(const Object& module, const char* name, Value&& value) {
  Check(PyObject_SetAttrString(module.get(), name, ToPython(std::forward<Value>(value)).get()));
}

}  // namespace jaxtap::python

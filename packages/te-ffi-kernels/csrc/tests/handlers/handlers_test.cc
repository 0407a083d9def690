// Every handler, called as XLA calls it: calls that work, and what is refused. The sanitizers see
// what reads or writes beyond a buffer.
#include <limits>
#include <set>
#include <string>

#include "ffi/stages.h"
#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

Threads& pool() {
  static Threads threads(3);
  return threads;
}

// Whether an outcome is one that a handler may have: it works, or says why not.
bool sound(const Program& program, const Outcome& outcome) {
  if (outcome.ok()) return true;
  return outcome.refused() && outcome.message.rfind(program.target + ": ", 0) == 0;
}

void check_sound(const Program& program, const Outcome& outcome, const std::string& what) {
  CHECK_THAT(sound(program, outcome), program.target + " with " + what + ": code " +
                                          std::to_string(outcome.code) + ", " + outcome.message);
}

TEST(handlers_each_have_a_case) {
  std::set<std::string> have;
  for (const auto& make : cases()) have.insert(make().program.target);
  for (const ffi::Target& target : ffi::Targets()) CHECK_THAT(have.count(target.name), target.name);
}

TEST(handlers_compute) {
  for (const auto& make : cases()) {
    Case one = make();
    for (Threads* threads : {static_cast<Threads*>(nullptr), &pool()}) {
      Program program = one.program;
      const int64_t before = ffi::WarmCounts()[program.target];
      const Outcome outcome = run(program, threads);
      CHECK_THAT(outcome.ok(), outcome.message);
      CHECK_THAT(ffi::WarmCounts()[program.target] == before + 1, program.target);
      if (outcome.ok()) one.expect(program);
    }
  }
}

TEST(handlers_refuse_what_can_not_be) {
  for (const auto& make : cases()) {
    const Case one = make();
    for (const Bad& bad : one.bad) {
      Program program = one.program;
      bad.change(program);
      const Outcome outcome = run(program, nullptr);
      CHECK_THAT(outcome.refused() && sound(program, outcome) && outcome.says(bad.part),
                 program.target + ": \"" + bad.part + "\" expected, got \"" + outcome.message + '"');
    }
  }
}

// Calls `with` for each attribute, those of dictionaries among them, with the dictionary it is in.
void each_attribute(Program& program,
                    const std::function<void(Dictionary&, const std::string&)>& with) {
  const std::function<void(Dictionary&)> walk = [&](Dictionary& dictionary) {
    for (const auto& [name, attribute] : Dictionary(dictionary)) {
      with(dictionary, name);
      auto* inner = std::get_if<Dictionary>(&dictionary.at(name).value);
      if (inner != nullptr) walk(*inner);
    }
  };
  walk(program.attributes);
}

TEST(handlers_need_their_attributes) {
  for (const auto& make : cases()) {
    const Case one = make();
    Program program = one.program;
    each_attribute(program, [&](Dictionary& dictionary, const std::string& name) {
      const Dictionary before = dictionary;
      dictionary.erase(name);
      Outcome outcome = run(program, nullptr);
      if (one.optional.count(name) != 0) {
        check_sound(program, outcome, "no " + name);
      } else {
        CHECK_THAT(outcome.refused() && outcome.says(name), program.target + " without " + name);
      }
      // Of another type than any has.
      dictionary.insert({name, Attribute(Dictionary())});
      if (std::holds_alternative<Dictionary>(before.at(name).value)) dictionary.at(name) = 1;
      outcome = run(program, nullptr);
      CHECK_THAT(outcome.refused() && outcome.says(name), program.target + " with another " + name);
      dictionary = before;
    });
  }
}

TEST(handlers_are_sound_whatever_attributes_say) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<Attribute> numbers;
  for (int64_t value : {int64_t{-2}, int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3},
                        int64_t{5}, int64_t{8}, int64_t{64}, int64_t{1} << 31, int64_t{1} << 33,
                        int64_t{1} << 62, kMost, -kMost - 1}) {
    numbers.emplace_back(value);
  }
  for (double value : {-1.0, 0.0, 0.5, 1e300, -1e300, std::nan(""), 1.0 / 0.0}) {
    numbers.emplace_back(value);
    numbers.emplace_back(static_cast<float>(value));
  }
  for (bool value : {false, true}) numbers.emplace_back(value);
  for (const auto& make : cases()) {
    Program program = make().program;
    each_attribute(program, [&](Dictionary& dictionary, const std::string& name) {
      const Attribute before = dictionary.at(name);
      for (const Attribute& number : numbers) {
        if (number.value.index() != before.value.index()) continue;
        dictionary.at(name) = number;
        check_sound(program, run(program, nullptr), "another number for " + name);
      }
      dictionary.at(name) = before;
    });
  }
}

// Calls `with` for each operand and result, which it may change.
void each_array(const Program& program, const std::function<void(Program&, Tensor&)>& with) {
  for (size_t i = 0; i < program.operands.size() + program.results.size(); ++i) {
    Program changed = program;
    const bool given = i < program.operands.size();
    with(changed, given ? changed.operands[i] : changed.results[i - program.operands.size()]);
  }
}

Outcome execute(Program& program) {
  return run(program, XLA_FFI_ExecutionStage_EXECUTE, nullptr);
}

TEST(handlers_are_sound_whatever_dtypes_arrays_have) {
  for (const auto& make : cases()) {
    each_array(make().program, [](Program& program, Tensor& array) {
      for (XLA_FFI_DataType dtype : kDtypes) {
        array.dtype = dtype;
        array.fit();
        const Outcome outcome = execute(program);
        check_sound(program, outcome, "dtype " + std::to_string(dtype));
        if (outcome.ok() || dtype != XLA_FFI_DataType_C64) continue;
        CHECK_THAT(outcome.says("which no kernel takes"), outcome.message);
      }
    });
  }
}

TEST(handlers_are_sound_whatever_shapes_arrays_have) {
  for (const auto& make : cases()) {
    each_array(make().program, [](Program& program, Tensor& array) {
      const Tensor before = array;
      const auto with = [&](std::vector<int64_t> dims) {
        array = before;
        array.dims = std::move(dims);
        array.fit();
        check_sound(program, execute(program), "a shape of rank " +
                                                   std::to_string(array.dims.size()));
      };
      with({});
      with({before.size()});
      std::vector<int64_t> more = before.dims;
      more.insert(more.begin(), 1);
      with(more);
      more[0] = 2;
      with(more);
      for (size_t axis = 0; axis < before.dims.size(); ++axis) {
        const int64_t size = before.dims[axis];
        for (int64_t other : {int64_t{0}, size - 1, size + 1, 2 * size}) {
          if (other < 0) continue;
          std::vector<int64_t> dims = before.dims;
          dims[axis] = other;
          with(dims);
        }
        std::vector<int64_t> fewer = before.dims;
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(axis));
        with(fewer);
      }
    });
  }
}

TEST(handlers_need_buffers) {
  for (const auto& make : cases()) {
    int refused = 0;
    each_array(make().program, [&](Program& program, Tensor& array) {
      array.is_buffer = false;
      const Outcome outcome = execute(program);
      check_sound(program, outcome, "no buffer");
      if (outcome.ok()) return;
      CHECK_THAT(outcome.says("must be a buffer"), outcome.message);
      ++refused;
    });
    CHECK(refused > 1);
  }
}

TEST(handlers_count_operands_and_results) {
  for (const auto& make : cases()) {
    const Program program = make().program;
    for (bool given : {true, false}) {
      for (bool more : {true, false}) {
        Program changed = program;
        std::vector<Tensor>& arrays = given ? changed.operands : changed.results;
        if (more) {
          arrays.push_back(arrays.back());
        } else {
          arrays.pop_back();
        }
        const Outcome outcome = execute(changed);
        const std::string wanted = "there must be " + std::to_string(program.operands.size()) +
                                   " and " + std::to_string(program.results.size());
        CHECK_THAT(outcome.refused() && outcome.says(wanted), program.target + outcome.message);
      }
    }
  }
}

TEST(handlers_answer_what_they_were_built_for) {
  for (const ffi::Target& target : ffi::Targets()) {
    for (XLA_FFI_Handler* handler : {target.instantiate, target.execute}) {
      if (handler == nullptr) continue;
      XLA_FFI_Metadata metadata = {};
      metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
      metadata.traits = ~0u;
      XLA_FFI_Metadata_Extension extension = {};
      extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE,
                                  XLA_FFI_Extension_Metadata, nullptr};
      extension.metadata = &metadata;
      XLA_FFI_CallFrame frame = {};
      frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
      frame.api = &fake_api();
      frame.extension_start = &extension.extension_base;
      CHECK_THAT(call(handler, frame).ok(), target.name);
      CHECK(metadata.api_version.major_version == XLA_FFI_API_MAJOR &&
            metadata.api_version.minor_version == XLA_FFI_API_MINOR && metadata.traits == 0);
      extension.extension_base.struct_size = 8;
      Outcome outcome = call(handler, frame);
      CHECK(outcome.code == XLA_FFI_Error_Code_FAILED_PRECONDITION &&
            outcome.says("Install a newer jaxlib"));
      frame.extension_start = nullptr;
      frame.stage = XLA_FFI_ExecutionStage_PREPARE;
      outcome = call(handler, frame);
      CHECK(outcome.refused() && outcome.says("the stage must be"));
      frame.struct_size = 16;
      CHECK(call(handler, frame).says("XLA_FFI_CallFrame must have at least"));
    }
  }
}

}  // namespace

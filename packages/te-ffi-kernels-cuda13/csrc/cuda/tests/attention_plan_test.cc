// Attention by way of a cuDNN in memory, on threads in software, against the CPU's; and plans whose
// making or running fails: no object is left, and the first error is the one told.
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "cuda/attention/plan.h"
#include "cuda/kernels/attention.h"
#include "cuda/tests/fake_cudnn.h"
#include "cuda/tests/kernels.h"
#include "tests/check.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::cuda;
using namespace jaxtap::testing;
using attention::Segment;

// A call as its attributes say it, and which tokens its segments have.
struct Case {
  DType dtype = DType::BF16;
  int64_t layout = 9, mask = 0, batch = 2, queries = 13, keys = 17, heads = 2, kv_heads = 2;
  int64_t qk_size = 8, v_size = 8, left = -1, right = -1;
  int64_t bias_batch = 0, bias_heads = 0;  // 0: no bias
  int64_t softmax = 0, most_segments = 1;
  double dropout = 0;

  bool is_thd() const { return layout >= 10; }
  int64_t segments() const { return batch * most_segments; }

  template <typename T>
  std::optional<T> get(const std::string& name) const {
    if constexpr (std::is_same_v<T, double>) {
      return name == "scaling_factor" ? 0.3 : dropout;
    } else if constexpr (std::is_same_v<T, bool>) {
      return name == "bottom_right_diagonal" ? mask >= 4 : name == "is_training";
    } else {
      const std::map<std::string, int64_t> all = {
          {"input_batch", batch}, {"bias_batch", bias_batch}, {"q_max_seqlen", queries},
          {"kv_max_seqlen", keys}, {"attn_heads", heads}, {"num_gqa_groups", kv_heads},
          {"bias_heads", bias_heads}, {"qk_head_dim", qk_size}, {"v_head_dim", v_size},
          {"max_segments_per_seq", most_segments}, {"window_size_left", left},
          {"window_size_right", right}, {"qkv_layout", layout},
          {"bias_type", bias_batch == 0 ? 0 : 2}, {"mask_type", mask}, {"softmax_type", softmax}};
      return all.at(name);
    }
  }

  std::string text() const {
    return std::string(name(dtype)) + ", layout " + std::to_string(layout) + ", mask " +
           std::to_string(mask) + ", " + std::to_string(batch) + " x " + std::to_string(queries) +
           " x " + std::to_string(keys) + ", heads " + std::to_string(heads) + " and " +
           std::to_string(kv_heads) + ", window " + std::to_string(left) + ", " +
           std::to_string(right) + ", bias " + std::to_string(bias_batch) + ", softmax " +
           std::to_string(softmax);
  }
};

// Arrays of one dtype that begin with numbers, or with NaN.
Buffer made(int64_t count, DType dtype, std::mt19937* random) {
  if (random != nullptr) return numbers(count, dtype, true, 1.0f, *random);
  Buffer buffer(count * bytes_of(dtype), 0);
  fill_nan(buffer);
  return buffer;
}

Buffer zeros(int64_t count, DType dtype) {
  Buffer buffer(count * bytes_of(dtype), 0);
  std::memset(buffer.get(), 0, static_cast<size_t>(buffer.size()));
  return buffer;
}

// Three arrays, or those that a layout has.
struct Qkv {
  Qkv(const Case& c, const ffi::AttentionConfig& config, std::mt19937* random, bool zero = false)
      : lines(config) {
    const int64_t q_tokens = c.batch * c.queries, kv_tokens = c.batch * c.keys;
    const int count = config.packed_all() ? 1 : config.packed_keys() ? 2 : 3;
    const int64_t sizes[] = {q_tokens * lines.q.stride, kv_tokens * lines.k.stride,
                             kv_tokens * lines.v.stride};
    for (int i = 0; i < count; ++i) {
      arrays.push_back(zero ? zeros(sizes[i], c.dtype) : made(sizes[i], c.dtype, random));
    }
    const auto at = [&](int array, const ffi::Lines& line) {
      return arrays[static_cast<size_t>(array)].get() + line.begin * bytes_of(c.dtype);
    };
    q = at(0, lines.q);
    k = at(count == 1 ? 0 : 1, lines.k);
    v = at(count - 1, lines.v);
  }
  attention::Tokens tokens(uint8_t* data, const ffi::Lines& line) const {
    return {data, line.stride, line.size};
  }
  ffi::QkvLines lines;
  std::vector<Buffer> arrays;
  uint8_t *q, *k, *v;
};

constexpr uint32_t kSeed[2] = {7, 0x80000009u};

// All operands, and results of both sides.
struct Run {
  Run(const Case& c, std::mt19937& random)
      : given(c),
        config(c),
        qkv(c, config, &random),
        out_grad(made(out_count(), c.dtype, &random)),
        bias(made(bias_count(), c.dtype, &random)),
        sink(made(c.heads, DType::F32, &random)),
        wanted_out(zeros(out_count(), c.dtype)),
        wanted_stats(zeros(stats_count(), DType::F32)),
        wanted(c, config, nullptr, true),
        wanted_bias(zeros(bias_count(), c.dtype)),
        wanted_sink(zeros(c.heads, DType::F32)) {
    place(random);
    on_cpu();
  }

  int64_t out_count() const { return given.batch * given.queries * given.heads * given.v_size; }
  int64_t stats_count() const { return given.batch * given.queries * given.heads; }
  int64_t bias_count() const {
    return given.bias_batch * given.bias_heads * given.queries * given.keys;
  }

  // Lengths: all, some, none; and the places of packed segments, with gaps, not in order.
  void place(std::mt19937& random) {
    const int64_t count = given.segments();
    q_cu = kv_cu = {0};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = i / given.most_segments, slot = i % given.most_segments;
      for (bool keys : {false, true}) {
        const int64_t all = keys ? given.keys : given.queries, room = all / given.most_segments;
        std::vector<int32_t>& cu = keys ? kv_cu : q_cu;
        int64_t length = all;
        if (!config.all_are_whole()) {
          length = random() % 5 == 0 ? 0 : static_cast<int64_t>(random() % (room + 1));
        }
        cu.push_back(cu.back() + static_cast<int32_t>(length));
        const int64_t at = row * all + (given.most_segments - 1 - slot) * room;
        (keys ? kv_at : q_at).push_back(static_cast<int32_t>(at));
      }
    }
    // Of exactly their size, as buffers are.
    for (std::vector<int32_t>* one : {&q_cu, &kv_cu, &q_at, &kv_at}) one->shrink_to_fit();
  }

  static Segment segment_of(const void* self, int64_t i) {
    const Run& run = *static_cast<const Run*>(self);
    const Case& c = run.given;
    const auto at = static_cast<size_t>(i);
    Segment s;
    s.number = i;
    s.batch = i;
    s.q_start = c.is_thd() ? run.q_at[at] : i * c.queries;
    s.kv_start = c.is_thd() ? run.kv_at[at] : i * c.keys;
    s.q_length = run.q_cu[at + 1] - run.q_cu[at];
    s.kv_length = run.kv_cu[at + 1] - run.kv_cu[at];
    s.aux_start = c.is_thd() ? s.q_start * c.heads : i * c.heads * c.queries;
    return s;
  }

  void on_cpu() {
    const Case& c = given;
    attention::Problem p;
    p.dtype = c.dtype;
    p.segments = c.segments();
    p.segment = segment_of;
    p.context = this;
    p.most_queries = c.queries;
    p.most_keys = c.keys;
    p.q_heads = c.heads;
    p.kv_heads = c.kv_heads;
    p.qk_size = c.qk_size;
    p.v_size = c.v_size;
    p.q = qkv.tokens(qkv.q, qkv.lines.q);
    p.k = qkv.tokens(qkv.k, qkv.lines.k);
    p.v = qkv.tokens(qkv.v, qkv.lines.v);
    p.out = {wanted_out.get(), c.heads * c.v_size, c.v_size};
    p.scale = config.scale;
    if (c.bias_batch != 0) {
      p.bias_type = attention::Bias::kPostScale;
      p.bias = bias.get();
      p.bias_batches = c.bias_batch;
      p.bias_heads = c.bias_heads;
    }
    p.left = c.left;
    p.right = c.mask >= 2 ? 0 : c.right;
    p.bottom_right = c.mask >= 4;
    if (c.softmax != 0) p.sink = reinterpret_cast<const float*>(sink.get());
    p.aux = reinterpret_cast<float*>(wanted_stats.get());
    p.aux_token_stride = c.is_thd() ? c.heads : 1;
    p.aux_head_stride = c.is_thd() ? 1 : c.queries;
    p.dropout = config.dropout;
    p.seed[0] = kSeed[0];
    p.seed[1] = kSeed[1];
    for (int64_t i = 0; i < stats_count(); ++i) p.aux[i] = -kInfinity;
    attention::forward(p, Parallel());
    attention::Gradients gradients;
    gradients.out_grad = {out_grad.get(), p.out.token_stride, p.out.head_stride};
    gradients.q_grad = wanted.tokens(wanted.q, qkv.lines.q);
    gradients.k_grad = wanted.tokens(wanted.k, qkv.lines.k);
    gradients.v_grad = wanted.tokens(wanted.v, qkv.lines.v);
    if (c.bias_batch != 0) gradients.bias_grad = wanted_bias.get();
    if (c.softmax != 0) gradients.sink_grad = reinterpret_cast<float*>(wanted_sink.get());
    attention::backward(p, gradients, Parallel());
  }

  AttentionMemory memory(Buffer& workspace) {
    AttentionMemory m;
    m.q = qkv.q;
    m.k = qkv.k;
    m.v = qkv.v;
    m.bias = bias.get();
    m.sink = reinterpret_cast<float*>(sink.get());
    m.random = seed.data();
    m.words = 2;
    m.q_cumulative = q_cu.data();
    m.kv_cumulative = kv_cu.data();
    if (given.is_thd()) {
      m.q_at = q_at.data();
      m.kv_at = kv_at.data();
    }
    m.workspace = workspace.get();
    m.bytes = static_cast<size_t>(workspace.size());
    return m;
  }

  static int64_t bytes(const AttentionWorkspace& steps) {
    return static_cast<int64_t>(kWorkspaceAlignment + steps.bytes + FakeCudnn::kWorkspace);
  }

  // Forward and backward, as handlers have them. Of the results `found` has the last ones.
  void on_device(FakeCudnn& dnn, FakeRuntime& cuda, DnnPlans& plans) {
    {
      const AttentionWorkspace steps(config, given.dtype, false);
      const AttentionPlan plan(dnn, cuda, plans.of(dnn, cuda, 0, steps.graph), steps,
                               static_cast<size_t>(bytes(steps)));
      Buffer workspace(bytes(steps), 8);
      fill_nan(workspace);
      AttentionMemory m = memory(workspace);
      m.out = out.get();
      m.stats = reinterpret_cast<float*>(stats.get());
      m.state = state.data();
      m.state_words = 8;
      plan.run(m, FakeRuntime::stream(5));
    }
    const AttentionWorkspace steps(config, given.dtype, true);
    const AttentionPlan plan(dnn, cuda, plans.of(dnn, cuda, 0, steps.graph), steps,
                             static_cast<size_t>(bytes(steps)));
    Buffer workspace(bytes(steps), 8);
    fill_nan(workspace);
    AttentionMemory m = memory(workspace);
    m.out = wanted_out.get();
    m.stats = reinterpret_cast<float*>(wanted_stats.get());
    m.out_grad = out_grad.get();
    m.q_grad = grads.q;
    m.k_grad = grads.k;
    m.v_grad = grads.v;
    m.bias_grad = bias_grad.get();
    m.sink_grad = reinterpret_cast<float*>(sink_grad.get());
    plan.run(m, FakeRuntime::stream(6));
  }

  const Case given;
  const ffi::AttentionConfig config;
  Qkv qkv;
  Buffer out_grad, bias, sink;
  std::vector<int32_t> q_cu, kv_cu, q_at, kv_at;
  Buffer wanted_out, wanted_stats;
  Qkv wanted;
  Buffer wanted_bias, wanted_sink;
  Buffer out = made(out_count(), given.dtype, nullptr);
  Buffer stats = made(stats_count(), DType::F32, nullptr);
  Qkv grads{given, config, nullptr};
  Buffer bias_grad = made(bias_count(), given.dtype, nullptr);
  Buffer sink_grad = made(given.heads, DType::F32, nullptr);
  const std::vector<uint32_t> seed{kSeed[0], kSeed[1]};
  std::vector<uint32_t> state = std::vector<uint32_t>(8, 1);
};

// Whether all are near. What is 0 or infinite is that exactly.
bool alike(const Buffer& found, const Buffer& wanted, DType dtype) {
  const double step = dtype == DType::F32 ? 2e-2 : dtype == DType::F16 ? 4e-3 : 3e-2;
  double most = 1;
  const int64_t count = found.size() / bytes_of(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const double x = element(wanted.get(), dtype, i);
    if (std::isfinite(x)) most = std::fmax(most, std::fabs(x));
  }
  for (int64_t i = 0; i < count; ++i) {
    const double x = element(found.get(), dtype, i), y = element(wanted.get(), dtype, i);
    const bool exact = y == 0 || !std::isfinite(y);
    if (exact ? x != y : !(std::fabs(x - y) <= step * most)) return false;
  }
  return true;
}

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of the threads in software

void check(const Case& c, std::mt19937& random) {
  if (!takes_case()) return;
  FakeCudnn dnn;
  FakeRuntime cuda;
  {
    DnnPlans plans;
    Run run(c, random);
    run.on_device(dnn, cuda, plans);
    CHECK_THAT(alike(run.out, run.wanted_out, c.dtype), c.text() + ": result");
    CHECK_THAT(alike(run.stats, run.wanted_stats, DType::F32), c.text() + ": log-sum-exp");
    for (size_t i = 0; i < 8; ++i) CHECK(run.state[i] == (i < 2 ? kSeed[i] : 0));
    for (size_t i = 0; i < run.grads.arrays.size(); ++i) {
      CHECK_THAT(alike(run.grads.arrays[i], run.wanted.arrays[i], c.dtype),
                 c.text() + ": gradient of array " + std::to_string(i));
    }
    if (c.bias_batch != 0) {
      CHECK_THAT(alike(run.bias_grad, run.wanted_bias, c.dtype), c.text() + ": of the bias");
    }
    if (c.softmax != 0) {
      CHECK_THAT(alike(run.sink_grad, run.wanted_sink, DType::F32), c.text() + ": of the sink");
    }
    CHECK(dnn.stream == FakeRuntime::stream(6) && dnn.count("create") == 2);
  }
  CHECK_THAT(dnn.left() == 0 && dnn.misused == 0, c.text() + ": objects or calls that can't be");
}

TEST(cuda_attention) {
  std::mt19937 random(21);
  for (int64_t layout : {5, 7, 9, 10, 12, 14}) {
    for (int64_t mask = 0; mask < 6; ++mask) {
      const bool padding = mask == 1 || mask == 3 || mask == 5;
      if (layout >= 10 && !padding) continue;
      for (int variant = 0; variant < 6; ++variant) {
        Case c;
        c.dtype = random() % 2 == 0 ? DType::BF16 : DType::F16;
        c.layout = layout;
        c.mask = mask;
        c.batch = 1 + static_cast<int64_t>(random() % 3);
        c.heads = variant % 2 == 0 ? 2 : 4;
        c.kv_heads = layout % 5 == 0 ? c.heads : 2;
        if (layout % 5 == 0) c.queries = c.keys;
        if (layout == 9 || layout == 14) c.v_size = 16;
        c.most_segments = layout >= 10 ? 3 : 1;
        if (variant == 1 || variant == 4) c.left = 3;
        if (variant == 2 || variant == 4) c.right = 2;
        if (variant == 3) c.softmax = 2;
        if (variant == 5) c.dropout = layout >= 10 ? 0 : 0.3;  // the fake counts packed segments
        if (layout < 10 && variant % 3 == 0) {
          c.bias_batch = random() % 2 == 0 ? 1 : c.batch;
          c.bias_heads = random() % 2 == 0 ? 1 : c.heads;
        }
        check(c, random);
      }
    }
  }
}

// Rows that see nothing, in padded segments with fewer keys than queries.
TEST(cuda_attention_with_more_queries_than_keys) {
  std::mt19937 random(22);
  for (int64_t layout : {9, 14}) {
    for (int64_t mask : {1, 3, 5}) {
      for (int64_t left : {-1, 0, 2}) {
        for (int64_t softmax : {0, 1}) {
          Case c;
          c.layout = layout;
          c.mask = mask;
          c.batch = 3;
          c.queries = 24;
          c.keys = 6;
          c.left = left;
          c.softmax = softmax;
          c.most_segments = layout == 14 ? 2 : 1;
          check(c, random);
        }
      }
    }
  }
}

TEST(cuda_attention_segments) {
  std::mt19937 random(23);
  for (int64_t segments : {1, 2, 255, 256, 257, 1000}) {
    for (bool packed : {false, true}) {
      const int64_t most[2] = {9, 12}, tokens[2] = {400, 500};
      std::vector<int32_t> cu[2], at[2];
      for (int side = 0; side < 2; ++side) {
        cu[side] = {0};
        for (int64_t i = 0; i < segments; ++i) {
          // Some that can't be: of less than nothing, too long, or outside.
          const int32_t length = static_cast<int32_t>(random() % 16) - 3;
          cu[side].push_back(cu[side].back() + length);
          at[side].push_back(static_cast<int32_t>(random() % 520) - 10);
        }
        cu[side].shrink_to_fit();
        at[side].shrink_to_fit();
      }
      const auto count = static_cast<size_t>(segments);
      std::vector<int32_t> q_lengths(count, -1), kv_lengths(count, -1);
      std::vector<int64_t> places(5 * (count + 1), -1);
      std::vector<int64_t> seed = {-1, -1};
      const std::vector<uint32_t> random_state = {3, 0x90000000u, 11, 12};
      AttentionSegments args;
      args.segments = segments;
      args.q = {cu[0].data(), packed ? at[0].data() : nullptr, most[0], tokens[0]};
      args.kv = {cu[1].data(), packed ? at[1].data() : nullptr, most[1], tokens[1]};
      args.q_lengths = q_lengths.data();
      args.kv_lengths = kv_lengths.data();
      if (packed) args.places = places.data();
      for (int i = 0; i < 5; ++i) args.strides[i] = 10 + i;
      args.random = random_state.data();
      args.words = 4;
      args.seed = seed.data();
      attention_segments(args, nullptr);
      CHECK(static_cast<uint64_t>(seed[0]) == 0x9000000000000003u && seed[1] == 11);

      const auto cut = [](int64_t x, int64_t top) {
        return std::max<int64_t>(0, std::min(x, top));
      };
      size_t next = 0;
      bool good = true;
      for (size_t i = 0; i < count; ++i) {
        int64_t begin[2] = {0, 0}, length[2];
        for (int side = 0; side < 2; ++side) {
          if (packed) begin[side] = cut(at[side][i], tokens[side]);
          const int64_t room =
              packed ? std::min(most[side], tokens[side] - begin[side]) : most[side];
          length[side] = cut(static_cast<int64_t>(cu[side][i + 1]) - cu[side][i], room);
        }
        if (packed && (length[0] == 0 || length[1] == 0)) continue;
        if (length[1] == 0) length[0] = 0, length[1] = 1;
        good = good && q_lengths[next] == length[0] && kv_lengths[next] == length[1];
        for (size_t p = 0; packed && p < 5; ++p) {
          const int64_t begins = begin[p == 1 || p == 2 ? 1 : 0];
          good = good &&
                 places[p * (count + 1) + next] == begins * static_cast<int64_t>(10 + p);
        }
        ++next;
      }
      for (size_t i = next; packed && i <= count; ++i) {
        if (i < count) good = good && q_lengths[i] == 0 && kv_lengths[i] == 0;
        for (size_t p = 0; p < 5; ++p) {
          const int64_t end = tokens[p == 1 || p == 2 ? 1 : 0];
          good = good && places[p * (count + 1) + i] == end * static_cast<int64_t>(10 + p);
        }
      }
      CHECK_THAT(good, std::to_string(segments) + " segments" + (packed ? ", packed" : ""));
    }
  }
}

// One with lengths and a sink, one that is packed in one array.
std::vector<Case> cases_for_faults() {
  Case padded, packed;
  padded.mask = 3;
  padded.softmax = 2;
  packed.layout = 10;
  packed.mask = 1;
  packed.keys = packed.queries;
  packed.most_segments = 2;
  return {padded, packed};
}

TEST(cuda_attention_with_a_fault_at_each_call) {
  for (const Case& c : cases_for_faults()) {
    std::mt19937 random(24);
    Run run(c, random);
    int all = 0;
    {
      FakeCudnn counted;
      FakeRuntime cuda;
      {
        DnnPlans plans;
        run.on_device(counted, cuda, plans);
      }
      all = static_cast<int>(counted.calls.size());
      CHECK(counted.left() == 0);
    }
    for (bool late : {false, true}) {
      for (int one = 0; one < all; ++one) {
        FakeCudnn dnn;
        FakeRuntime cuda;
        dnn.faults = {{one, 100 + one, late}, {one + 2, 200 + one, late}};
        std::string error;
        {
          DnnPlans plans;
          try {
            run.on_device(dnn, cuda, plans);
          } catch (const CudaError& thrown) {
            error = thrown.what();
          }
          const std::string what =
              c.text() + ", a fault at call " + std::to_string(one) + ": " + error;
          const bool told =
              error.find("fake status " + std::to_string(100 + one)) != std::string::npos;
          CHECK_THAT(told || dnn.calls.size() <= static_cast<size_t>(one), what);
          CHECK_THAT(cuda.last_error == 0 && cuda.device == 0, what);
          // It's tried again, and works.
          dnn.faults.clear();
          run.on_device(dnn, cuda, plans);
          CHECK_THAT(alike(run.out, run.wanted_out, c.dtype), what);
        }
        CHECK(dnn.left() == 0 && dnn.misused == 0);
      }
    }
  }
}

TEST(cuda_attention_with_a_fault_of_the_runtime) {
  for (const Case& c : cases_for_faults()) {
    std::mt19937 random(25);
    Run run(c, random);
    int all = 0;
    for (int one = -1; one < all || one < 0; ++one) {
      FakeCudnn dnn;
      FakeRuntime cuda;
      if (one >= 0) cuda.faults = {{one, 700 + one, false}};
      DnnPlans plans;
      bool threw = false;
      try {
        run.on_device(dnn, cuda, plans);
      } catch (const CudaError& error) {
        threw = error.code() == 700 + one;
      }
      CHECK(threw == (one >= 0) && cuda.last_error == 0);
      if (one < 0) all = static_cast<int>(cuda.calls.size());
    }
    CHECK(all > 0);
  }
}

#endif

// What takes time is done once for all call sites; a call sets addresses, and runs.
TEST(cuda_attention_plans_are_shared) {
  FakeCudnn dnn;
  FakeRuntime cuda;
  {
    DnnPlans plans;
    Case c;
    const AttentionWorkspace one(ffi::AttentionConfig(c), c.dtype, false);
    const DnnPlans::Entry& first = plans.of(dnn, cuda, 0, one.graph);
    CHECK(&plans.of(dnn, cuda, 0, one.graph) == &first && dnn.count("build") == 1);
    CHECK(&plans.of(dnn, cuda, 3, one.graph) != &first && cuda.device == 0);
    CHECK(dnn.count("create") == 2);
    // Each of these makes another graph.
    std::vector<Case> others(12, c);
    others[0].batch = 5;
    others[1].queries = 11;
    others[2].left = 4;
    others[3].mask = 1;
    others[4].mask = 2;
    others[5].v_size = 16;
    others[6].softmax = 1;
    others[7].dropout = 0.5;
    others[8].layout = 7;
    others[9].bias_batch = others[9].bias_heads = 1;
    others[10].heads = 4;
    others[11].dtype = DType::F16;
    int built = dnn.count("build");
    for (const Case& other : others) {
      const AttentionWorkspace steps(ffi::AttentionConfig(other), other.dtype, false);
      plans.of(dnn, cuda, 0, steps.graph);
      CHECK(dnn.count("build") == ++built);
    }
    plans.of(dnn, cuda, 0, AttentionWorkspace(ffi::AttentionConfig(c), c.dtype, true).graph);
    CHECK(dnn.count("build") == ++built);
  }
  CHECK(dnn.left() == 0 && dnn.misused == 0);
}

// A plan takes seconds: calls of others don't wait for it.
TEST(cuda_attention_runs_while_another_plan_is_built) {
  struct Slow : FakeCudnn {
    int build(DnnHandle handle, const AttentionGraph& graph, DnnPlan* plan, size_t* workspace,
              std::string* why) override {
      if (during) std::exchange(during, nullptr)();
      return FakeCudnn::build(handle, graph, plan, workspace, why);
    }
    std::function<void()> during;
  } dnn;
  FakeRuntime cuda;
  {
    DnnPlans plans;
    Case c;
    const AttentionWorkspace forward(ffi::AttentionConfig(c), c.dtype, false);
    const AttentionWorkspace back(ffi::AttentionConfig(c), c.dtype, true);
    const DnnPlans::Entry& entry = plans.of(dnn, cuda, 0, forward.graph);
    bool found = false, free = false;
    dnn.during = [&] {
      std::thread([&] {
        found = &plans.of(dnn, cuda, 0, forward.graph) == &entry;
        free = entry.running.try_lock();
        if (free) entry.running.unlock();
      }).join();
    };
    const DnnPlans::Entry& other = plans.of(dnn, cuda, 0, back.graph);
    CHECK(found && free && other.handle.get() != entry.handle.get());
  }
  CHECK(dnn.left() == 0 && dnn.misused == 0);
}

TEST(cuda_attention_that_cudnn_has_not) {
  FakeCudnn dnn;
  FakeRuntime cuda;
  {
    DnnPlans plans;
    Case c;
    const ffi::AttentionConfig config(c);
    const AttentionWorkspace steps(config, c.dtype, false);
    dnn.refuses = true;
    const DnnPlans::Entry& entry = plans.of(dnn, cuda, 0, steps.graph);
    CHECK(entry.plan.get() == nullptr && entry.why == "the fake has no such graph");
    CHECK(throws<Error>([&] { AttentionPlan(dnn, cuda, entry, steps, 1 << 20); }, "no such graph"));
    CHECK(&plans.of(dnn, cuda, 0, steps.graph) == &entry && dnn.count("build") == 1);
    dnn.refuses = false;
    const AttentionWorkspace back(config, c.dtype, true);
    const DnnPlans::Entry& other = plans.of(dnn, cuda, 0, back.graph);
    const auto needed = static_cast<size_t>(Run::bytes(back));
    CHECK(throws<Error>([&] { AttentionPlan(dnn, cuda, other, back, needed - 1); },
                        "bytes, got " + std::to_string(needed - 1)));
    AttentionPlan plan(dnn, cuda, other, back, needed);
    AttentionMemory memory;
    CHECK(throws<Error>([&] { plan.run(memory, nullptr); }, "bytes, got 0"));
    alignas(256) static char some[4096];
    memory.workspace = some;
    memory.bytes = needed;
    memory.v = some + 8;
    CHECK(throws<Error>([&] { plan.run(memory, nullptr); }, "isn't a multiple of 16"));
    CHECK(throws<Error>([&] { AttentionWorkspace(config, DType::F32, false); },
                        "q must ... got float32"));
  }
  CHECK(dnn.left() == 0 && dnn.misused == 0);
}

}  // namespace

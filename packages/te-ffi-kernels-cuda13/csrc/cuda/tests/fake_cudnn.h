// A small cuDNN in memory, which attends slowly, in double, from what the graph says. Where cuDNN
// leaves results as they come, it leaves NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "common/philox.h"
#include "cuda/cudnn.h"
#include "cuda/tests/fake_library.h"
#include "tests/weights.h"

namespace jaxtap::testing {

class FakeCudnn : public cuda::Cudnn, public FakeLibrary {
 public:
  using Which = cuda::AttentionArray;
  using Graph = cuda::AttentionGraph;

  bool refuses = false;
  cuda::Stream stream = nullptr;
  static constexpr size_t kWorkspace = 160;

  // Objects that nobody has destroyed.
  size_t left() const { return handles.size() + plans.size(); }

  int create(cuda::DnnHandle* handle) override {
    return call("create", [&] { add(handles, handle); });
  }
  int destroy(cuda::DnnHandle handle) override {
    remove(handles, handle);
    return call("destroy", [] {});
  }
  int set_stream(cuda::DnnHandle handle, cuda::Stream given) override {
    return call("set_stream", [&] {
      misused += handles.count(handle) == 0;
      stream = given;
    });
  }
  int build(cuda::DnnHandle handle, const Graph& graph, cuda::DnnPlan* plan, size_t* workspace,
            std::string* why) override {
    return call("build", [&] {
      misused += handles.count(handle) == 0;
      if (refuses || !supports(graph)) {
        *why = "the fake has no such graph";
        return;
      }
      *workspace = kWorkspace;
      add(plans, plan) = graph;
    });
  }
  int destroy_plan(cuda::DnnPlan plan) override {
    remove(plans, plan);
    return call("destroy_plan", [] {});
  }
  int execute(cuda::DnnHandle handle, cuda::DnnPlan plan, const cuda::AttentionArrays& arrays,
              void* workspace) override {
    return call("execute", [&] {
      if (handles.count(handle) == 0 || plans.count(plan) == 0) {
        ++misused;
        return;
      }
      const Graph& graph = plans.at(plan);
      misused += !has_arrays(graph, arrays);
      std::memset(workspace, 0xEE, kWorkspace);
      Run(graph, arrays).run();
    });
  }
  std::string text(int status) override { return said_of(status); }

 private:
  static bool supports(const Graph& g) {
    if (g.qk_size % 8 != 0 || g.v_size % 8 != 0 || (g.ragged && !g.padded)) return false;
    return g.padded || g.queries <= g.keys || (g.left < 0 && !g.bottom_right);
  }

  // Those that a graph needs are there, and no other.
  static bool has_arrays(const Graph& g, const cuda::AttentionArrays& a) {
    const auto alike = [&](bool needed, std::initializer_list<Which> all) {
      for (Which one : all) {
        if ((a[one] != nullptr) != needed) return false;
      }
      return true;
    };
    return alike(true, {Which::kQ, Which::kK, Which::kV, Which::kOut, Which::kStats}) &&
           alike(g.has_bias, {Which::kBias}) && alike(g.has_sink, {Which::kSink}) &&
           alike(g.padded, {Which::kQLengths, Which::kKvLengths}) &&
           alike(g.ragged, {Which::kQAt, Which::kKAt, Which::kVAt, Which::kOutAt,
                            Which::kStatsAt}) &&
           alike(g.dropout > 0, {Which::kSeed, Which::kOffset}) &&
           alike(g.backward,
                 {Which::kOutGrad, Which::kQGrad, Which::kKGrad, Which::kVGrad}) &&
           alike(g.backward && g.has_bias, {Which::kBiasGrad}) &&
           alike(g.backward && g.has_sink, {Which::kSinkGrad});
  }

  // One execution.
  class Run {
   public:
    Run(const Graph& graph, const cuda::AttentionArrays& arrays) : g(graph), a(arrays) {
      if (!g.backward) return;
      q_grad.resize(size(g.segments * g.q_heads * g.queries * g.qk_size));
      k_grad.resize(size(g.segments * g.kv_heads * g.keys * g.qk_size));
      v_grad.resize(size(g.segments * g.kv_heads * g.keys * g.v_size));
      bias_grad.resize(size(g.has_bias ? g.bias_batches * g.bias_heads * g.queries * g.keys : 0));
      sink_grad.resize(size(g.q_heads));
    }

    void run() {
      for (int64_t s = 0; s < g.segments; ++s) {
        for (int64_t h = 0; h < g.q_heads; ++h) {
          for (int64_t i = 0; i < g.queries; ++i) row(s, h, i);
        }
      }
      if (g.backward) write_gradients();
    }

   private:
    static size_t size(int64_t count) { return static_cast<size_t>(count); }
    static constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    static constexpr double kNone = -std::numeric_limits<double>::infinity();

    int64_t length(Which lengths, int64_t s, int64_t most) const {
      return g.padded ? static_cast<const int32_t*>(a[lengths])[s] : most;
    }
    int64_t queries(int64_t s) const { return length(Which::kQLengths, s, g.queries); }
    int64_t keys(int64_t s) const { return length(Which::kKvLengths, s, g.keys); }

    int64_t place(const cuda::AttentionStrides& strides, Which at, int64_t s, int64_t h,
                  int64_t i) const {
      const int64_t begin =
          g.ragged ? static_cast<const int64_t*>(a[at])[s] : s * strides.segment;
      return begin + h * strides.head + i * strides.token;
    }
    double read(Which which, int64_t at) const {
      return element(static_cast<const uint8_t*>(a[which]), g.dtype, at);
    }
    void write(Which which, int64_t at, double x) const {
      set_element(static_cast<uint8_t*>(a[which]), g.dtype, at, static_cast<float>(x));
    }
    double q(int64_t s, int64_t h, int64_t i, int64_t d) const {
      return read(Which::kQ, place(g.q, Which::kQAt, s, h, i) + d);
    }
    double k(int64_t s, int64_t h, int64_t j, int64_t d) const {
      return read(Which::kK, place(g.k, Which::kKAt, s, group(h), j) + d);
    }
    double v(int64_t s, int64_t h, int64_t j, int64_t d) const {
      return read(Which::kV, place(g.v, Which::kVAt, s, group(h), j) + d);
    }
    int64_t group(int64_t h) const { return h / (g.q_heads / g.kv_heads); }
    int64_t bias_at(int64_t s, int64_t h, int64_t i, int64_t j) const {
      const int64_t batch = g.bias_batches == 1 ? 0 : s, head = g.bias_heads == 1 ? 0 : h;
      return ((batch * g.bias_heads + head) * g.queries + i) * g.keys + j;
    }

    bool sees(int64_t s, int64_t i, int64_t j) const {
      if (j >= keys(s)) return false;
      const int64_t away = j - i - (g.bottom_right ? keys(s) - queries(s) : 0);
      return (g.left < 0 || away >= -g.left) && (g.right < 0 || away <= g.right);
    }
    double score(int64_t s, int64_t h, int64_t i, int64_t j) const {
      double sum = 0;
      for (int64_t d = 0; d < g.qk_size; ++d) sum += q(s, h, i, d) * k(s, h, j, d);
      sum *= static_cast<double>(g.scale);
      return g.has_bias ? sum + read(Which::kBias, bias_at(s, h, i, j)) : sum;
    }
    // The factor of dropout. cuDNN draws other words; these can be compared with the CPU's.
    double kept(int64_t s, int64_t h, int64_t i, int64_t j) const {
      if (!(g.dropout > 0)) return 1;
      const auto seed = static_cast<uint64_t>(*static_cast<const int64_t*>(a[Which::kSeed]));
      const auto offset = *static_cast<const int64_t*>(a[Which::kOffset]);
      uint32_t words[4] = {static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i),
                           static_cast<uint32_t>(s * g.q_heads + h),
                           static_cast<uint32_t>(offset)};
      philox(words[0], words[1], words[2], words[3], static_cast<uint32_t>(seed),
             static_cast<uint32_t>(seed >> 32));
      const auto dropout = static_cast<double>(g.dropout);
      const bool keeps = words[j % 4] >= static_cast<uint32_t>(dropout * 4294967296.0);
      return keeps ? 1 / (1 - dropout) : 0;
    }

    void row(int64_t s, int64_t h, int64_t i) {
      auto* stats = static_cast<float*>(a[Which::kStats]);
      const int64_t at = place(g.stats, Which::kStatsAt, s, h, i);
      const int64_t out = place(g.out, Which::kOutAt, s, h, i);
      if (i >= queries(s)) {
        if (g.backward) {
          spoil(q_grad, ((s * g.q_heads + h) * g.queries + i) * g.qk_size, g.qk_size);
        } else if (!g.ragged) {
          stats[at] = static_cast<float>(kNan);
          for (int64_t d = 0; d < g.v_size; ++d) write(Which::kOut, out + d, kNan);
        }
        return;
      }
      if (g.backward) return back(s, h, i, static_cast<double>(stats[at]));
      std::vector<double> scores(size(g.keys), kNone);
      const double sink =
          g.has_sink ? static_cast<double>(static_cast<const float*>(a[Which::kSink])[h]) : kNone;
      double top = sink;
      for (int64_t j = 0; j < g.keys; ++j) {
        if (!sees(s, i, j)) continue;
        scores[size(j)] = score(s, h, i, j);
        top = std::fmax(top, scores[size(j)]);
      }
      double sum = g.has_sink ? std::exp(sink - top) : 0;
      for (double one : scores) sum += one == kNone ? 0 : std::exp(one - top);
      stats[at] = static_cast<float>(top + std::log(sum));
      for (int64_t d = 0; d < g.v_size; ++d) {
        double total = 0;
        for (int64_t j = 0; j < g.keys; ++j) {
          if (scores[size(j)] == kNone) continue;
          total += std::exp(scores[size(j)] - top) * kept(s, h, i, j) * v(s, h, j, d);
        }
        // With nothing to see: NaN.
        write(Which::kOut, out + d, total / sum);
      }
    }

    void back(int64_t s, int64_t h, int64_t i, double stats) {
      const int64_t at = place(g.out, Which::kOutAt, s, h, i);
      double delta = 0;
      for (int64_t d = 0; d < g.v_size; ++d) {
        delta += read(Which::kOutGrad, at + d) * read(Which::kOut, at + d);
      }
      if (g.has_sink) {
        const double sink = static_cast<double>(static_cast<const float*>(a[Which::kSink])[h]);
        sink_grad[size(h)] -= std::exp(sink - stats) * delta;
      }
      const double scale = static_cast<double>(g.scale);
      for (int64_t j = 0; j < g.keys; ++j) {
        // As the graph has it: a score that isn't seen is -inf, and p is exp(score - stats).
        const double p = std::exp((sees(s, i, j) ? score(s, h, i, j) : kNone) - stats);
        if (p == 0 || j >= keys(s)) continue;
        const double keep = kept(s, h, i, j);
        double dp = 0;
        for (int64_t d = 0; d < g.v_size; ++d) {
          const double grad = read(Which::kOutGrad, at + d);
          dp += grad * v(s, h, j, d);
          v_grad[kv_at(s, h, j, g.v_size) + size(d)] += p * keep * grad;
        }
        const double ds = p * (dp * keep - delta);
        if (g.has_bias) bias_grad[size(bias_at(s, h, i, j))] += ds;
        for (int64_t d = 0; d < g.qk_size; ++d) {
          q_grad[size(((s * g.q_heads + h) * g.queries + i) * g.qk_size + d)] +=
              ds * scale * k(s, h, j, d);
          k_grad[kv_at(s, h, j, g.qk_size) + size(d)] += ds * scale * q(s, h, i, d);
        }
      }
    }

    size_t kv_at(int64_t s, int64_t h, int64_t j, int64_t width) const {
      return size(((s * g.kv_heads + group(h)) * g.keys + j) * width);
    }
    static void spoil(std::vector<double>& all, int64_t at, int64_t count) {
      for (int64_t i = 0; i < count; ++i) all[size(at + i)] = kNan;
    }

    // What is beyond a segment's length isn't written where segments are packed, and is NaN else.
    void write_some(Which which, Which at, const cuda::AttentionStrides& strides,
                    const std::vector<double>& all, int64_t heads, int64_t most, int64_t width,
                    bool of_keys) const {
      for (int64_t s = 0; s < g.segments; ++s) {
        const int64_t length = of_keys ? keys(s) : queries(s);
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t i = 0; i < most; ++i) {
            if (i >= length && g.ragged) continue;
            for (int64_t d = 0; d < width; ++d) {
              const double x = all[size(((s * heads + h) * most + i) * width + d)];
              write(which, place(strides, at, s, h, i) + d, i < length ? x : kNan);
            }
          }
        }
      }
    }

    void write_gradients() const {
      write_some(Which::kQGrad, Which::kQAt, g.q, q_grad, g.q_heads, g.queries, g.qk_size, false);
      write_some(Which::kKGrad, Which::kKAt, g.k, k_grad, g.kv_heads, g.keys, g.qk_size, true);
      write_some(Which::kVGrad, Which::kVAt, g.v, v_grad, g.kv_heads, g.keys, g.v_size, true);
      for (size_t i = 0; i < bias_grad.size(); ++i) {
        // What nobody sees isn't written.
        if (bias_grad[i] != 0) write(Which::kBiasGrad, static_cast<int64_t>(i), bias_grad[i]);
      }
      // A sum, into what is there.
      auto* sinks = static_cast<float*>(a[Which::kSinkGrad]);
      for (int64_t h = 0; g.has_sink && h < g.q_heads; ++h) {
        sinks[h] += static_cast<float>(sink_grad[size(h)]);
      }
    }

    const Graph& g;
    const cuda::AttentionArrays& a;
    std::vector<double> q_grad, k_grad, v_grad, bias_grad, sink_grad;
  };

  std::map<cuda::DnnHandle, Nothing> handles;
  std::map<cuda::DnnPlan, Graph> plans;
};

}  // namespace jaxtap::testing

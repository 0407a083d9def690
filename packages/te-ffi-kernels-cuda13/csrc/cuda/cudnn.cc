// cuDNN, through NVIDIA's cudnn-frontend, whose headers are all of it. The only file that has them.
#include "cuda/cudnn.h"

#include <cudnn_frontend.h>

#include <unordered_map>
#include <vector>

#include "common/error.h"
#include "cuda/cudnn_library.h"

namespace jaxtap::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using Tensor = std::shared_ptr<Tensor_attributes>;
using Which = AttentionArray;

// What cudnn-frontend said last, on this thread.
thread_local std::string message;

// A graph of cudnn-frontend, made of ours. Tensors have the numbers of their arrays, after 0.
class Made {
 public:
  explicit Made(const AttentionGraph& given) : given_(given) {
    graph.set_io_data_type(given.dtype == DType::BF16 ? fe::DataType_t::BFLOAT16
                                                      : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (given.backward) {
      add_backward();
    } else {
      add_forward();
    }
  }

  fe::graph::Graph graph;

 private:
  static int64_t uid(Which which) { return static_cast<int64_t>(which) + 1; }

  Tensor small(Which which, int64_t count, fe::DataType_t type) {
    return graph.tensor(Tensor_attributes()
                            .set_uid(uid(which))
                            .set_dim({count, 1, 1, 1})
                            .set_stride({1, 1, 1, 1})
                            .set_data_type(type));
  }

  // The offsets of segments, one tensor for all that begin there.
  Tensor places(Which which) {
    Tensor& found = places_[which];
    if (found == nullptr) found = small(which, given_.segments + 1, fe::DataType_t::INT64);
    return found;
  }

  // Shape, strides and offsets of an array [segments, heads, tokens, size].
  template <class To>
  To& shaped(To& tensor, Which at, int64_t heads, int64_t tokens, int64_t size,
             const AttentionStrides& strides) {
    tensor.set_dim({given_.segments, heads, tokens, size})
        .set_stride({strides.segment, strides.head, strides.token, 1});
    if (given_.ragged) tensor.set_ragged_offset(places(at));
    return tensor;
  }
  Tensor_attributes& of_q(Tensor_attributes& to) {
    return shaped(to, Which::kQAt, given_.q_heads, given_.queries, given_.qk_size, given_.q);
  }
  Tensor_attributes& of_k(Tensor_attributes& to) {
    return shaped(to, Which::kKAt, given_.kv_heads, given_.keys, given_.qk_size, given_.k);
  }
  Tensor_attributes& of_v(Tensor_attributes& to) {
    return shaped(to, Which::kVAt, given_.kv_heads, given_.keys, given_.v_size, given_.v);
  }
  Tensor_attributes& of_out(Tensor_attributes& to) {
    return shaped(to, Which::kOutAt, given_.q_heads, given_.queries, given_.v_size, given_.out);
  }
  Tensor_attributes& of_stats(Tensor_attributes& to) {
    return shaped(to, Which::kStatsAt, given_.q_heads, given_.queries, 1, given_.stats)
        .set_data_type(fe::DataType_t::FLOAT);
  }
  Tensor input(Which which, Tensor_attributes& (Made::*shape)(Tensor_attributes&)) {
    Tensor_attributes tensor;
    return graph.tensor((this->*shape)(tensor).set_uid(uid(which)));
  }
  void output(const Tensor& tensor, Which which,
              Tensor_attributes& (Made::*shape)(Tensor_attributes&)) {
    (this->*shape)(*tensor).set_uid(uid(which)).set_output(true);
  }

  Tensor_attributes bias(Which which) const {
    const int64_t square = given_.queries * given_.keys;
    return Tensor_attributes()
        .set_uid(uid(which))
        .set_dim({given_.bias_batches, given_.bias_heads, given_.queries, given_.keys})
        .set_stride({given_.bias_heads * square, square, given_.keys, 1});
  }
  Tensor_attributes sink(Which which) const {
    return Tensor_attributes()
        .set_uid(uid(which))
        .set_dim({1, given_.q_heads, 1, 1})
        .set_stride({given_.q_heads, 1, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
  }

  // What both directions have.
  template <class Options>
  void set(Options& options) {
    options.set_attn_scale(given_.scale);
    options.set_diagonal_alignment(given_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                       : fe::DiagonalAlignment_t::TOP_LEFT);
    // cuDNN's left bound is the first place that isn't seen.
    if (given_.left >= 0) options.set_diagonal_band_left_bound(static_cast<int>(given_.left + 1));
    if (given_.right >= 0) options.set_diagonal_band_right_bound(static_cast<int>(given_.right));
    if (given_.padded) {
      options.set_padding_mask(true)
          .set_seq_len_q(small(Which::kQLengths, given_.segments, fe::DataType_t::INT32))
          .set_seq_len_kv(small(Which::kKvLengths, given_.segments, fe::DataType_t::INT32));
    }
    if (given_.has_bias) options.set_bias(graph.tensor(bias(Which::kBias)));
    if (given_.has_sink) options.set_sink_token(graph.tensor(sink(Which::kSink)));
    if (given_.dropout > 0) {
      options.set_dropout(given_.dropout, small(Which::kSeed, 1, fe::DataType_t::INT64),
                          small(Which::kOffset, 1, fe::DataType_t::INT64));
    }
  }

  void add_forward() {
    const Tensor q = input(Which::kQ, &Made::of_q), k = input(Which::kK, &Made::of_k);
    const Tensor v = input(Which::kV, &Made::of_v);
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(true)
                       .set_implementation(fe::AttentionImplementation_t::COMPOSITE);
    set(options);
    auto found = graph.sdpa(q, k, v, options);
    output(found[0], Which::kOut, &Made::of_out);
    output(found[1], Which::kStats, &Made::of_stats);
  }

  void add_backward() {
    const Tensor q = input(Which::kQ, &Made::of_q), k = input(Which::kK, &Made::of_k);
    const Tensor v = input(Which::kV, &Made::of_v), out = input(Which::kOut, &Made::of_out);
    const Tensor grad = input(Which::kOutGrad, &Made::of_out);
    const Tensor stats = input(Which::kStats, &Made::of_stats);
    auto options = fe::graph::SDPA_backward_attributes().set_name("attention_gradient");
    set(options);
    options.set_deterministic_algorithm(given_.deterministic);
    if (given_.ragged) {
      options.set_max_total_seq_len_q(given_.q_tokens).set_max_total_seq_len_kv(given_.kv_tokens);
    }
    if (given_.has_bias) options.set_dbias(graph.tensor(bias(Which::kBiasGrad)));
    if (given_.has_sink) options.set_dsink_token(graph.tensor(sink(Which::kSinkGrad)));
    auto found = graph.sdpa_backward(q, k, v, out, grad, stats, options);
    output(found[0], Which::kQGrad, &Made::of_q);
    output(found[1], Which::kKGrad, &Made::of_k);
    output(found[2], Which::kVGrad, &Made::of_v);
  }

  const AttentionGraph given_;
  std::unordered_map<Which, Tensor> places_;
};

Made* of(DnnPlan plan) { return reinterpret_cast<Made*>(plan); }

// Calls `body`, which returns cudnn-frontend's error: no exception leaves this.
template <class Body>
fe::error_t guarded(Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return {fe::error_code_t::GRAPH_NOT_SUPPORTED, error.what()};
  }
}

bool is_failure(const fe::error_t& error) {
  return error.code == fe::error_code_t::CUDA_API_FAILED ||
         error.code == fe::error_code_t::HANDLE_ERROR;
}

class Loaded : public Cudnn {
 public:
  int create(DnnHandle* handle) override { return told(cudnnCreate(handle)); }
  int destroy(DnnHandle handle) override { return told(cudnnDestroy(handle)); }
  int set_stream(DnnHandle handle, Stream stream) override {
    return told(cudnnSetStream(handle, stream));
  }
  int build(DnnHandle handle, const AttentionGraph& graph, DnnPlan* plan, size_t* workspace,
            std::string* why) override {
    std::unique_ptr<Made> made;
    int64_t bytes = 0;
    const fe::error_t error = guarded([&]() -> fe::error_t {
      made = std::make_unique<Made>(graph);
      fe::error_t found = made->graph.build(handle, {fe::HeurMode_t::A});
      if (found.is_good()) found = made->graph.get_workspace_size(bytes);
      return found;
    });
    message = error.err_msg;
    if (error.is_good()) {
      *workspace = static_cast<size_t>(bytes);
      *plan = reinterpret_cast<DnnPlan>(made.release());
    } else if (is_failure(error)) {
      return CUDNN_STATUS_INTERNAL_ERROR;
    } else {
      *why = message.empty() ? "it doesn't say why" : message;
    }
    return 0;
  }
  int destroy_plan(DnnPlan plan) override {
    delete of(plan);
    return 0;
  }
  int execute(DnnHandle handle, DnnPlan plan, const AttentionArrays& arrays,
              void* workspace) override {
    const fe::error_t error = guarded([&] {
      std::unordered_map<int64_t, void*> given;
      given.reserve(arrays.all.size());
      for (size_t i = 0; i < arrays.all.size(); ++i) {
        if (arrays.all[i] != nullptr) given[static_cast<int64_t>(i) + 1] = arrays.all[i];
      }
      return of(plan)->graph.execute(handle, given, workspace);
    });
    message = error.err_msg;
    return error.is_good() ? 0 : static_cast<int>(CUDNN_STATUS_EXECUTION_FAILED);
  }
  std::string text(int status) override {
    const std::string name = cudnnGetErrorString(static_cast<cudnnStatus_t>(status));
    return message.empty() ? name : name + ": " + message;
  }

 private:
  static int told(cudnnStatus_t status) {
    message.clear();
    return static_cast<int>(status);
  }
};

}  // namespace

size_t load_cudnn(const std::string& path, std::string* error) { return open_cudnn(path, error); }

Cudnn& cudnn() {
  static auto* found = new Loaded;
  if (!has_cudnn()) {
    throw failed_precondition("cuDNN isn't loaded; install nvidia-cudnn-cu13, as jax[cuda13] does");
  }
  return *found;
}

}  // namespace jaxtap::cuda

// The attention kernel that a CUDA build would choose, by the predicates of torch's own header and
// those of its CUDA file (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp) that matter here:
// flash, then memory-efficient, then explicit products. cuDNN's kernel, which some builds prefer on
// Hopper, is not modelled.
#pragma once
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace hostcuda {

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }
inline bool has_one_dtype(const sdp::sdp_params& p) {
  return p.query.scalar_type() == p.key.scalar_type() &&
      p.query.scalar_type() == p.value.scalar_type();
}
inline bool can_use_flash(const sdp::sdp_params& p) {
  using namespace sdp;
  const auto width = p.query.sym_size(-1);
  return check_runtime_disabled_flash(p, false) && check_tensor_shapes(p, false) &&
      check_for_attn_mask(p, false) && width == p.key.sym_size(-1) &&
      width == p.value.sym_size(-1) && width <= 256 && is_half(p.query.scalar_type()) &&
      has_one_dtype(p) && (!p.is_causal || p.query.sym_size(-2) == p.key.sym_size(-2)) &&
      check_batch_size_and_num_heads_dense<true, true>(p, false) &&
      check_nonzero_sequence_lengths_dense(p, false) &&
      check_last_dim_stride_equals_1_dense<true>(p, false);
}
inline bool can_use_efficient(const sdp::sdp_params& p) {
  using namespace sdp;
  const auto dtype = p.query.scalar_type();
  const int64_t alignment = is_half(dtype) ? 8 : 4;
  const auto width = p.query.sym_size(-1), value_width = p.value.sym_size(-1);
  return check_runtime_disabled_mem_efficient(p, false) && check_tensor_shapes(p, false) &&
      (is_half(dtype) || dtype == at::kFloat) && has_one_dtype(p) && width == p.key.sym_size(-1) &&
      width % alignment == 0 && value_width % alignment == 0 && width > 0 && value_width > 0 &&
      check_nonzero_sequence_lengths_dense(p, false) &&
      check_last_dim_stride_equals_1_dense<false>(p, false) &&
      check_batch_size_and_num_heads_dense<false>(p, false);
}

inline std::atomic<int64_t> attention_choices[8] = {};
inline int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const std::optional<at::Tensor>& mask, double dropout,
                                bool is_causal, std::optional<double>, bool enable_gqa) {
  const sdp::sdp_params p{q, k, v, mask, dropout, is_causal, enable_gqa};
  const auto choice = can_use_flash(p) ? at::SDPBackend::flash_attention
      : can_use_efficient(p)           ? at::SDPBackend::efficient_attention
                                       : at::SDPBackend::math;
  TORCH_CHECK(choice != at::SDPBackend::math || at::globalContext().userEnabledMathSDP(),
              "No available kernel. Aborting execution.");
  attention_choices[static_cast<int64_t>(choice)]++;
  return static_cast<int64_t>(choice);
}
struct RegisterChoice {
  RegisterChoice() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention); }
};
inline RegisterChoice register_choice;

}  // namespace hostcuda

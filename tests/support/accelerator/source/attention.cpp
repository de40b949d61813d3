// Attention: the CPU's fused kernel where it takes the arguments, else PyTorch's products and softmax.
//
// What is saved for backward is then as on a GPU: query, key, value, the output and the logarithms of the sums.
#include "kernels.h"

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace sim {

namespace {

using at::Tensor;

bool fused(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal) {
  return at::globalContext().userEnabledFlashSDP() && dropout == 0 && !mask.has_value() && query.dim() == 4 &&
      query.numel() != 0 && key.numel() != 0 && key.size(1) == query.size(1) && value.size(1) == query.size(1) &&
      query.size(3) == value.size(3) && query.size(3) == key.size(3) && query.stride(3) == 1 && key.stride(3) == 1 &&
      value.stride(3) == 1 && at::isFloatingType(query.scalar_type()) && !(causal && query.size(2) != key.size(2));
}

int64_t choose(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, std::optional<double>, bool) {
  const bool can = fused(query, key, value, mask, dropout, causal);
  return static_cast<int64_t>(can ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Forward forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>&, double dropout, bool causal,
    bool, std::optional<double> scale) {
  auto [output, sums] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, std::nullopt, scale);
  // A GPU's kernel counts its draws here; there are none.
  const auto none = at::empty({0}, query.options().dtype(at::kLong));
  return {output, sums, none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&, std::array<bool, 4>,
    const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
    bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  auto [query_grad, key_grad, value_grad] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, output, sums, dropout, causal, std::nullopt, scale);
  return {query_grad, key_grad, value_grad, Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", forward);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward);
}

} // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose)
} // namespace at::native

// Operators: those that are no kernel (memory, views, storages), and those that the CPU has under another name.
//
// All others come to `launch` (kernels.h) by the fallback at the end. Operators that PyTorch would otherwise compose of
// smaller ones, although the CPU has a kernel for them, are given to `launch` by name, so that the bits are the CPU's.
#include "device.h"
#include "kernels.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

namespace sim {

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using c10::SymIntArrayRef;

c10::Device device_asked(std::optional<c10::Device> device) {
  const auto index = device.has_value() && device->has_index() ? device->index() : current_device();
  return c10::Device(c10::DeviceType::PrivateUse1, index);
}

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device_asked(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device_asked(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), keys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void make_room(const c10::Storage& storage, size_t nbytes) {
  if (storage.nbytes() < nbytes)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, nbytes);
}

const Tensor& resize(const Tensor& self, SymIntArrayRef sym_size, std::optional<at::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(sym_size);
  auto* changed = self.unsafeGetTensorImpl();
  if (self.sizes() != size)
    changed->set_sizes_contiguous(size);
  if (format.has_value())
    changed->empty_tensor_restride(*format);
  make_room(self.storage(), at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset()));
  return self;
}

Tensor& set_strided(Tensor& self, at::Storage source, c10::SymInt offset, SymIntArrayRef sym_size, SymIntArrayRef sym_stride) {
  const auto size = C10_AS_INTARRAYREF_SLOW(sym_size);
  const auto contiguous = c10::contiguous_strides(size);
  const IntArrayRef stride = sym_stride.empty() ? IntArrayRef(contiguous) : C10_AS_INTARRAYREF_SLOW(sym_stride);
  make_room(source, at::detail::computeStorageNbytes(size, stride, self.itemsize(), offset.expect_int()));
  at::native::checkSetStorage(self, source, offset.expect_int(), size, stride);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.expect_int());
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_strided(self, std::move(source), 0, c10::fromIntArrayRefSlow({elements}), {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl())
    return self;
  return set_strided(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::OptionalDeviceGuard guard(self.device());
  at::Storage none(at::Storage::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true);
  return set_strided(self, std::move(none), 0, c10::fromIntArrayRefSlow({0}), {});
}

at::Scalar local_scalar(const Tensor& self) {
  return at::_local_scalar_dense(self.cpu());
}

void record_stream(Tensor& self, c10::Stream one) {
  device_allocator().recordStream(self.storage().data_ptr(), one);
}

// The CPU's native_dropout draws from the CPU's generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true))
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

// Runs an operator that the CPU has under another name, with the arguments on the stack.
void launch_as(const char* name, torch::jit::Stack* stack) {
  launch(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  launch_as("aten::convolution", stack);
}

// (grad, input, weight, stride, ...) -> (grad, input, weight, bias sizes, stride, ...)
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  constexpr size_t kArguments = 10;
  const auto first = stack->end() - kArguments;
  const auto weight = first[2].toTensor();
  const bool transposed = first[6].toBool();
  const int64_t channels = transposed ? weight.size(1) * first[8].toInt() : weight.size(0);
  stack->insert(first + 3, IValue(std::vector<int64_t>{channels}));
  launch_as("aten::convolution_backward", stack);
}

// Of integers too, as CUDA has it.
void histogram(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& self = *(stack->end() - 4);
  const auto type = self.toTensor().scalar_type();
  if (at::isFloatingType(type))
    return launch(op, stack);
  self = self.toTensor().to(at::kDouble);
  launch(op, stack);
  stack->back() = stack->back().toTensor().to(type);
}

// A cell of an LSTM as CUDA fuses it. The gates lie as they do there: input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  if (input_bias.has_value() && input_bias->defined())
    gates = gates + *input_bias + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  const bool through_h = grad_hy.has_value() && grad_hy->defined(), through_c = grad_cy.has_value() && grad_cy->defined();
  if (!through_h && !through_c)
    return {};
  const auto parts = workspace.chunk(4, 1);
  const auto &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const auto t = cy.tanh();
  Tensor grad_c = through_c ? *grad_cy : at::empty_like(cy).zero_();
  Tensor grad_o = at::empty_like(o).zero_();
  if (through_h) {
    grad_c = grad_c + *grad_hy * o * (1 - t * t);
    grad_o = *grad_hy * t * o * (1 - o);
  }
  const auto grad_gates =
      at::cat({grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_o}, 1);
  return {grad_gates, grad_c * f, has_bias ? grad_gates.sum(0) : Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", dropout);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histogram>());
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "native_batch_norm", "silu_backward", "mish_backward", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

} // namespace sim

// Shapes: what an operator would return, by its meta kernel, and what an argument holds.
//
// Guarantees
// - The answer depends on the arguments' sizes, strides, types and numbers alone, so it is asked for once: many meta
//   kernels are written in Python and take a millisecond.
// - Arguments that the CPU's kernel refuses although the meta kernel takes them (a type that it does not have, two types
//   that do not go together) give no answer, so that the kernel runs at once and the operator raises, as CUDA's does:
//   on small ones the kernel is tried, on zeros, when they are first asked for.
// - Statistics of normalisations have the types that the CPU's kernels give.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <vector>

namespace sim {

using c10::IValue;
using Values = torch::jit::Stack;
using TensorChange = std::function<at::Tensor(const at::Tensor&)>;

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// The tensors in a value, lists of them included.
inline std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> found;
  if (value.isTensor())
    found.push_back(value.toTensor());
  else if (value.isList())
    for (const IValue& element : value.toListRef())
      if (element.isTensor())
        found.push_back(element.toTensor());
  return found;
}

inline IValue with_tensors(const IValue& value, const TensorChange& change) {
  if (value.isTensor())
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (!value.isList())
    return value;
  auto changed = value.toList().copy();
  for (size_t i = 0; i < changed.size(); ++i) {
    const IValue element = changed.get(i);
    if (element.isTensor() && element.toTensor().defined())
      changed.set(i, change(element.toTensor()));
  }
  return changed;
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

inline bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>())
    type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// What a meta kernel or a kernel warns of concerns tensors that nobody has made.
class Quiet {
 public:
  Quiet() : guard_(&none_) {}

 private:
  struct None final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  None none_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

struct Shapes {
  std::optional<Values> results; // tensors without memory; none where only the kernel can tell
  std::vector<std::vector<int64_t>> written; // sizes that the tensors which are written have afterwards
};

Shapes infer(const c10::OperatorHandle& op, const Values& arguments);

} // namespace sim

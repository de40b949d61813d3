// Shapes: see shapes.h.
#include "shapes.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace sim {

namespace {

// The words that tell one question from another.
class Question {
 public:
  Question(const c10::OperatorHandle& op, const Values& arguments) {
    add(reinterpret_cast<int64_t>(&op.schema()));
    add(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
    for (size_t i = 0; i < arguments.size(); ++i)
      if (!takes_generator(op.schema().arguments()[i]))
        add(arguments[i]);
  }

  bool complete() const { return complete_; } // false with an argument of another kind than those below
  const std::string& words() const { return words_; }

 private:
  void add(int64_t number) { words_.append(reinterpret_cast<const char*>(&number), sizeof number); }

  void add(const IValue& value) {
    if (value.isTensor())
      return add(value.toTensor());
    if (value.isList()) {
      const auto elements = value.toListRef();
      words_ += 'l';
      add(static_cast<int64_t>(elements.size()));
      for (const auto& element : elements)
        add(element);
    } else if (value.isNone()) {
      words_ += 'n';
    } else if (value.isBool()) {
      words_ += value.toBool() ? 't' : 'f';
    } else if (value.isInt()) {
      words_ += 'i';
      add(value.toInt());
    } else if (value.isDouble()) {
      words_ += 'd';
      const double number = value.toDouble();
      words_.append(reinterpret_cast<const char*>(&number), sizeof number);
    } else if (value.isString()) {
      words_ += 's';
      add(static_cast<int64_t>(value.toStringRef().size()));
      words_ += value.toStringRef();
    } else if (value.isDevice()) {
      words_ += 'p';
    } else {
      complete_ = false;
    }
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      words_ += 'u';
      return;
    }
    words_ += on_device(tensor) ? 'T' : 'H';
    const auto* impl = tensor.unsafeGetTensorImpl();
    const auto found = std::find(seen_.begin(), seen_.end(), impl); // the same tensor twice is another question
    add(found - seen_.begin());
    if (found == seen_.end())
      seen_.push_back(impl);
    add(static_cast<int64_t>(tensor.scalar_type()) * 2 + impl->is_wrapped_number());
    add(tensor.dim());
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      add(tensor.size(i));
      add(tensor.stride(i));
    }
  }

  std::string words_;
  std::vector<const c10::TensorImpl*> seen_;
  bool complete_ = true;
};

struct Answers {
  std::mutex lock;
  std::unordered_map<std::string, Shapes> by_question;
};

Answers& answers() {
  static auto* answers = new Answers();
  return *answers;
}

constexpr size_t kMostAnswers = 50000; // then all are forgotten
constexpr size_t kMostTried = 1 << 20; // bytes of arguments

bool returns_tensors_alone(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    auto type = returned.type();
    if (auto list = type->cast<c10::ListType>())
      type = list->getElementType();
    if (type->kind() != c10::TypeKind::TensorType)
      return false;
  }
  return true;
}

// The meta kernels of normalisations speak for CUDA, whose statistics are float32. The CPU's are of the input's type,
// unless the input alone is of a lower precision than the parameters.
void as_on_cpu(const std::string& name, const Values& arguments, Values& metas) {
  if (name != "aten::native_layer_norm" && name != "aten::native_group_norm" && name != "aten::native_batch_norm")
    return;
  const auto input = arguments[0].toTensor();
  bool mixed = false;
  for (const auto& argument : arguments)
    if (argument.isTensor() && argument.toTensor().defined())
      mixed |= argument.toTensor().scalar_type() != input.scalar_type();
  for (size_t i = 1; i < metas.size(); ++i)
    metas[i] = metas[i].toTensor().to(mixed ? at::kFloat : input.scalar_type());
}

Values as_metas(const c10::FunctionSchema& schema, const Values& arguments) {
  std::unordered_map<c10::TensorImpl*, at::Tensor> made;
  const auto to_meta = [&](const at::Tensor& tensor) {
    if (!on_device(tensor))
      return tensor;
    auto& meta = made[tensor.unsafeGetTensorImpl()];
    if (!meta.defined())
      meta = at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
    return meta;
  };
  Values metas;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (takes_generator(schema.arguments()[i]))
      metas.emplace_back();
    else if (arguments[i].isDevice())
      metas.emplace_back(c10::Device(c10::DeviceType::Meta));
    else
      metas.push_back(with_tensors(arguments[i], to_meta));
  return metas;
}

at::Tensor zeros_like_on_host(const at::Tensor& tensor) {
  const auto elements = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), 1);
  const auto options = at::TensorOptions(tensor.scalar_type()).device(at::kCPU);
  return at::zeros({static_cast<int64_t>(elements)}, options).as_strided(tensor.sizes(), tensor.strides());
}

// Whether the CPU's kernel takes arguments like these, by trying it on zeros; true where that would be much work or the
// kernel is a program's own.
bool accepted(const c10::OperatorHandle& op, const Values& arguments) {
  size_t nbytes = 0;
  for (const auto& argument : arguments)
    for (const auto& tensor : tensors_in(argument))
      nbytes += tensor.defined() ? at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()) : 0;
  if (op.operator_name().name.rfind("aten::", 0) != 0 || nbytes > kMostTried)
    return true;
  std::unordered_map<c10::TensorImpl*, at::Tensor> made;
  Values zeros;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (takes_generator(op.schema().arguments()[i]))
      zeros.emplace_back(at::make_generator<at::CPUGeneratorImpl>());
    else if (arguments[i].isDevice())
      zeros.emplace_back(c10::Device(c10::DeviceType::CPU));
    else
      zeros.push_back(with_tensors(arguments[i], [&](const at::Tensor& tensor) {
        auto& host = made[tensor.unsafeGetTensorImpl()];
        if (!host.defined())
          host = on_device(tensor) ? zeros_like_on_host(tensor) : tensor.clone();
        return host;
      }));
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &zeros);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

Shapes ask(const c10::OperatorHandle& op, const Values& arguments) {
  const auto& schema = op.schema();
  if (!returns_tensors_alone(schema) || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta))
    return {};
  const Values given = as_metas(schema, arguments);
  Values metas = given;
  const Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
  } catch (const std::exception&) {
    return {};
  }
  if (!accepted(op, arguments))
    return {};
  as_on_cpu(op.operator_name().name, arguments, metas);
  Shapes shapes{std::move(metas), {}};
  for (size_t i = 0; i < given.size(); ++i)
    if (is_written(schema.arguments()[i]))
      for (const auto& tensor : tensors_in(given[i]))
        shapes.written.push_back(tensor.defined() ? tensor.sizes().vec() : std::vector<int64_t>());
  return shapes;
}

} // namespace

Shapes infer(const c10::OperatorHandle& op, const Values& arguments) {
  const Question question(op, arguments);
  if (!question.complete())
    return ask(op, arguments);
  {
    std::lock_guard guard(answers().lock);
    if (auto found = answers().by_question.find(question.words()); found != answers().by_question.end())
      return found->second;
  }
  auto shapes = ask(op, arguments); // without the lock, as it may want Python's
  std::lock_guard guard(answers().lock);
  if (answers().by_question.size() >= kMostAnswers)
    answers().by_question.clear();
  return answers().by_question.emplace(question.words(), std::move(shapes)).first->second;
}

} // namespace sim

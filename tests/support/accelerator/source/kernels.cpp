// Kernels: see kernels.h.
#include "kernels.h"
#include "device.h"
#include "memory.h"
#include "shapes.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <unordered_map>

namespace sim {

namespace {

at::Tensor empty_like_meta(const at::Tensor& meta, c10::Device device) {
  const auto options = at::TensorOptions(meta.scalar_type()).device(device);
  return meta.is_non_overlapping_and_dense() ? at::empty_strided(meta.sizes(), meta.strides(), options)
                                             : at::empty_strided(meta.sizes(), c10::contiguous_strides(meta.sizes()), options);
}

// A tensor of the host at an address, with the sizes of another. A kernel may resize it: then it has other memory.
at::Tensor at_address(void* at, const at::Tensor& like) {
  const size_t nbytes = at::detail::computeStorageNbytes(like.sizes(), like.strides(), like.itemsize());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), nbytes, c10::DataPtr(at, c10::Device(c10::DeviceType::CPU)), at::getCPUAllocator(),
      /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

// Copies a tensor's elements to where its memory was, and gives it that memory again.
void take_back(const at::Tensor& tensor, void* at, size_t nbytes) {
  const auto elements = tensor.clone();
  TORCH_CHECK(
      nbytes >= at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()),
      "a kernel made an output larger than its meta kernel said");
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(at, c10::Device(c10::DeviceType::CPU)));
  storage->set_nbytes(nbytes);
  tensor.copy_(elements);
}

struct Count {
  std::mutex lock;
  std::map<std::string, std::pair<size_t, size_t>> by_name;
};

Count& count() {
  static auto* count = new Count();
  return *count;
}

// One operator about to run. Its arguments are the last values of a stack.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Values& arguments)
      : op_(op), arguments_(arguments), schema_(op.schema()), device_(find_device()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "sim: ", op.operator_name(), " has no kernel for the CPU");
    for (const auto& returned : schema_.returns())
      TORCH_CHECK_NOT_IMPLEMENTED(
          returned.alias_info() == nullptr || returned.alias_info()->isWrite(), "sim: ", op.operator_name(), " makes a view");
  }

  Values run() {
    c10::OptionalDeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, device_));
    const auto shapes = find_shapes();
    {
      std::lock_guard lock(count().lock);
      auto& numbers = count().by_name[c10::toString(op_.operator_name())];
      ++(shapes.has_value() ? numbers.first : numbers.second);
    }
    return shapes.has_value() ? run_later(*shapes) : run_now();
  }

 private:
  c10::DeviceIndex find_device() const {
    for (const auto& argument : arguments_)
      for (const auto& tensor : tensors_in(argument))
        if (on_device(tensor))
          return tensor.device().index();
    for (const auto& argument : arguments_)
      if (argument.isDevice() && argument.toDevice().has_index())
        return argument.toDevice().index();
    return current_device();
  }

  // What the operator would return; none where only the kernel can tell. Outputs that the caller gave and that do not
  // fit are resized.
  std::optional<Values> find_shapes() const {
    const auto found = infer(op_, arguments_);
    size_t number = 0;
    for (size_t i = 0; i < arguments_.size() && found.results.has_value(); ++i)
      if (is_written(schema_.arguments()[i]))
        for (const auto& original : tensors_in(arguments_[i]))
          if (const auto& size = found.written.at(number++); original.defined() && original.sizes() != at::IntArrayRef(size))
            original.resize_(size);
    return found.results;
  }

  // The arguments for the CPU's kernel. `own` is called for tensors that the operator writes.
  Values for_host(const TensorChange& written) {
    std::unordered_map<c10::TensorImpl*, at::Tensor> made; // one for each: kernels look whether two are the same
    Values values;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (takes_generator(argument)) {
        values.emplace_back(for_next_draw(arguments_[i].toOptional<at::Generator>(), device_));
        continue;
      }
      if (arguments_[i].isDevice()) {
        values.emplace_back(c10::Device(c10::DeviceType::CPU));
        continue;
      }
      const bool writes = is_written(argument);
      values.push_back(with_tensors(arguments_[i], [&](const at::Tensor& tensor) {
        auto& host = made[tensor.unsafeGetTensorImpl()];
        if (!host.defined())
          host = !on_device(tensor) ? (writes ? tensor : tensor.clone()) : writes ? written(tensor) : over(tensor);
        return host;
      }));
    }
    return values;
  }

  static void run_kernel(const c10::OperatorHandle& op, Values& values) {
    const Quiet quiet;
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
  }

  // What is returned for the outputs: an argument where it is one, else what `make` gives for it.
  Values returned(const Values& outputs, const TensorChange& make) {
    Values results;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto* alias = schema_.returns()[i].alias_info();
      results.push_back(alias == nullptr ? with_tensors(outputs[i], make) : argument_of(*alias));
    }
    return results;
  }

  const IValue& argument_of(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (schema_.arguments()[i].alias_info() != nullptr && *schema_.arguments()[i].alias_info() == alias)
        return arguments_[i];
    TORCH_CHECK(false, "sim: ", op_.operator_name(), " returns an argument that it does not have");
  }

  Values run_later(const Values& shapes) {
    const c10::Device device(c10::DeviceType::PrivateUse1, device_);
    const Values results = returned(shapes, [&](const at::Tensor& meta) { return empty_like_meta(meta, device); });
    // Addresses of the results, to copy to; nothing where the kernel writes an argument.
    Values targets;
    for (size_t i = 0; i < results.size(); ++i)
      targets.push_back(schema_.returns()[i].alias_info() == nullptr ? with_tensors(results[i], over) : IValue());
    std::vector<at::Tensor> written;
    const Values values = for_host([&](const at::Tensor& tensor) { return written.emplace_back(over(tensor)); });
    auto kernel = [op = op_, arguments = values, targets = std::move(targets), written = std::move(written)] {
      std::vector<std::pair<void*, size_t>> memory;
      for (const auto& tensor : written)
        memory.emplace_back(tensor.storage().mutable_data(), tensor.storage().nbytes());
      Values values = arguments; // the graph of a capture runs this again
      run_kernel(op, values);
      // Some kernels make an output larger for a while (mse_loss): its storage is then elsewhere.
      for (size_t i = 0; i < written.size(); ++i)
        if (written[i].storage().mutable_data() != memory[i].first)
          take_back(written[i], memory[i].first, memory[i].second);
      for (size_t i = 0; i < targets.size(); ++i) {
        const auto to = tensors_in(targets[i]), from = tensors_in(values[i]);
        for (size_t j = 0; j < to.size(); ++j)
          if (to[j].defined() && to[j].numel() != 0) {
            TORCH_CHECK(
                to[j].sizes() == from[j].sizes(), op.operator_name(), ": the meta kernel gave ", to[j].sizes(),
                ", the CPU's kernel ", from[j].sizes());
            to[j].copy_(from[j]); // PyTorch's two kernels may differ in dtype (mse_loss_backward of mixed ones)
          }
      }
    };
    queue(device_, std::move(kernel));
    return results;
  }

  // Sizes of what the operator writes may change: it writes copies, which are copied back.
  Values run_now() {
    refuse_if_forbidden(op_.operator_name().name.c_str());
    synchronize(current_stream(device_));
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    Values values = for_host([&](const at::Tensor& tensor) {
      copies.emplace_back(tensor, over(tensor).clone());
      return copies.back().second;
    });
    run_kernel(op_, values);
    for (const auto& [original, copy] : copies) {
      if (original.sizes() != copy.sizes())
        original.resize_(copy.sizes());
      if (copy.numel() != 0)
        over(original).copy_(copy);
    }
    const c10::Device device(c10::DeviceType::PrivateUse1, device_);
    Values results = returned(values, [&](const at::Tensor& host) {
      auto result = empty_like_meta(host, device);
      if (host.numel() != 0)
        queue(device_, [to = over(result), host] { to.copy_(host); });
      return result;
    });
    return results;
  }

  const c10::OperatorHandle& op_;
  const Values arguments_;
  const c10::FunctionSchema& schema_;
  const c10::DeviceIndex device_;
};

} // namespace

at::Tensor over(const at::Tensor& tensor) {
  void* at = tensor.numel() == 0 ? nullptr : accessible(tensor.data_ptr());
  return at_address(at, tensor);
}

void queue(c10::DeviceIndex device, Work kernel) {
  current_stream(device).enqueue([kernel = std::move(kernel)] {
    at::AutoDispatchBelowADInplaceOrView below;
    kernel();
  });
}

void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t number = op.schema().arguments().size();
  Values results = Call(op, torch::jit::last(*stack, number).vec()).run();
  torch::jit::drop(*stack, number);
  for (auto& result : results)
    stack->push_back(std::move(result));
}

std::map<std::string, std::pair<size_t, size_t>> counts() {
  std::lock_guard lock(count().lock);
  return count().by_name;
}

} // namespace sim

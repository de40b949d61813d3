// Kernels: an operator on the device is queued on the current stream and run later by the CPU's kernel.
//
// Guarantees
// - An operator returns once its results have shapes and memory; its kernel runs on the stream's thread, over the memory
//   by the mapping that kernels may use. It keeps no tensor alive: it has addresses, as a kernel on a GPU has, so memory
//   freed too early is somebody else's by the time it runs.
// - Shapes come from the operator's meta kernel. One without a meta kernel, or whose meta kernel refuses (sizes that
//   depend on values), and one that returns a value to the host, waits for the stream first and runs at once: `counts`
//   tells which.
// - Bits are those of the CPU's kernel for the same arguments, by the process's number of threads.
// - Arguments on the host are read at launch. An operator that draws numbers takes its place in the generator's sequence
//   at launch.
// Assumptions: a meta kernel that gives sizes gives the CPU kernel's; where it does not, the stream says so and the
// error is thrown at the next wait. Kernels in Python take Python's lock on the stream's thread: no waiter holds it.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>

namespace sim {

at::Tensor over(const at::Tensor& tensor); // a tensor of the host over a device tensor's memory, which is not kept alive
void queue(c10::DeviceIndex device, Work kernel); // on the current stream
void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack); // a boxed kernel for every operator
std::map<std::string, std::pair<size_t, size_t>> counts(); // by operator: kernels queued, kernels run at once

} // namespace sim

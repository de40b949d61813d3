// Device: what PyTorch asks a backend for beside kernels: guard, hooks, generators, threads of autograd.
//
// Guarantees
// - Autograd runs a thread for each device, also where a backward on the CPU came before `start_autograd`.
// - A generator is a seed and a count of draws, as Philox on CUDA: an operator that draws takes a place in the sequence
//   when it is launched, so what is drawn does not depend on when streams run. What is drawn differs from the CPU's.
#pragma once

#include "streams.h"

#include <ATen/core/Generator.h>

namespace sim {

at::Generator default_generator(c10::DeviceIndex device);
// A generator of the host, seeded for the next draw of one of a device. The default one's, where none is given.
at::Generator for_next_draw(const std::optional<at::Generator>& generator, c10::DeviceIndex device);
double elapsed_ms(void* begin, void* end); // between two events, by PyTorch's pointers
void start_device(); // once a process

} // namespace sim

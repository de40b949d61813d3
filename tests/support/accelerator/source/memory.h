// Memory: a device's, which the host may not touch, its allocator, and pinned memory of the host.
//
// Guarantees
// - A tensor's address lies in a mapping without rights: the host that reads or writes there dies by SIGSEGV. Kernels
//   and copies use a second mapping of the same pages (`accessible`).
// - The allocator is ordered by stream as CUDA's is: a block belongs to the stream that was current when its segment was
//   made; freed, it goes at once to the next who asks on that stream, and never to another. If `record_stream` named
//   other streams, it comes back when they have passed what was queued on them by the time it was freed.
// - Sizes, segments, splitting and merging follow CUDACachingAllocator (512 bytes; 2 MiB and 20 MiB segments), and so do
//   the figures: allocated, active (allocated or waiting for a stream) and reserved bytes.
// - Reserved memory stays below the limit. Where it would not, waiting blocks are awaited and free segments given back;
//   then c10::OutOfMemoryError.
// - Fresh memory is filled with 0xFF at once, memory just freed by its stream in order: NaN in every floating type, -1 in
//   integers. A read that is not ordered behind the write, or comes after the free, therefore reads poison.
// - Pinned memory freed while a copy that PyTorch knows of uses it is not handed out before that has ended, as by
//   CUDA's host allocator. Memory registered by address is nobody's care but the owner's.
// Assumption: Linux (memfd, MAP_SHARED, fallocate).
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace sim {

bool is_of_device(const void* address);
c10::DeviceIndex device_of(const void* address);
void* accessible(const void* address); // for kernels and copies alone

c10::DeviceAllocator& device_allocator();
c10::Allocator& host_allocator();
void record_use(void* address, Stream& stream); // of a block of `device_allocator`

void limit(c10::DeviceIndex device, size_t nbytes);
size_t limit(c10::DeviceIndex device);
void fraction(c10::DeviceIndex device, double share);
double fraction(c10::DeviceIndex device);
void poison(bool on);

bool is_pinned(const void* address, size_t nbytes = 1);
void record_host_use(const void* address, Stream& stream); // of a block of `host_allocator`; other memory is left alone
void host_register(void* address, size_t nbytes);
void host_unregister(void* address);

} // namespace sim

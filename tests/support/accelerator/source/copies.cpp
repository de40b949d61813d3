// Copies: between devices and the host, queued on the current stream.
//
// Guarantees
// - From pinned memory, and to it, with `non_blocking` the copy is queued and the call returns; the host's tensor is not
//   kept alive. A copy from other memory of the host is staged: the source has been read when the call returns. One to
//   other memory, or without `non_blocking`, waits for the stream. So it is on CUDA.
// - Bytes between a device and the host take the time of the link (streams.h); what has another layout or type is
//   changed on the device's side or on the host's, as CUDA's copy does, so that what crosses is contiguous.
// - A copy between two devices runs on the source's current stream, and the target's current stream waits for it.
#include "kernels.h"
#include "memory.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

namespace {

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  // Of two contiguous tensors, the strides of dimensions with one element may differ.
  const bool alike = a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous());
  return a.scalar_type() == b.scalar_type() && alike && a.is_non_overlapping_and_dense() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

at::Tensor plain(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.to(dtype).resolve_conj().resolve_neg().contiguous();
}

// Asked before a copy is queued: had it thrown, nobody would keep the host's memory for the copy.
void may_wait(const char* what) {
  refuse_if_forbidden(what);
  refuse_if_capturing(what);
}

void carry(Link& link, void* to, const void* from, size_t nbytes) {
  link.carry(nbytes, [to, from](size_t begin, size_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
  });
}

void between_devices(const at::Tensor& from, const at::Tensor& to) {
  const auto source = from.device().index(), target = to.device().index();
  auto kernel = [from = over(from), to = over(to)] { to.copy_(from); };
  if (source == target)
    return queue(source, std::move(kernel));
  current_stream(source).wait(current_stream(target).record());
  queue(source, std::move(kernel));
  current_stream(target).wait(current_stream(source).record());
}

void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto device = to.device().index();
  if (!same_bytes(from, to)) {
    const auto contiguous = plain(from, to.scalar_type());
    if (same_bytes(contiguous, to))
      return to_device(contiguous, to, non_blocking);
    const auto staged = at::empty_like(contiguous, contiguous.options().device(to.device()));
    to_device(contiguous, staged, non_blocking);
    return between_devices(staged, to);
  }
  const size_t nbytes = from.numel() * from.itemsize();
  auto& stream = current_stream(device);
  const bool pinned = is_pinned(from.data_ptr(), nbytes);
  if (!non_blocking)
    may_wait("copy from the host and wait");
  std::shared_ptr<char[]> staged; // kept by the work below
  const void* source = from.data_ptr();
  if (non_blocking && !pinned) {
    staged.reset(new char[nbytes]);
    source = std::memcpy(staged.get(), source, nbytes);
  }
  stream.enqueue([&link = link_in(device), target = accessible(to.data_ptr()), source, staged, nbytes] {
    carry(link, target, source, nbytes);
  });
  if (pinned)
    record_host_use(source, stream);
  if (!non_blocking)
    synchronize(stream);
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto device = from.device().index();
  if (!same_bytes(from, to)) {
    const auto contiguous = plain(from, to.scalar_type());
    if (same_bytes(contiguous, to))
      return to_host(contiguous, to, non_blocking);
    const auto crossed = at::empty(contiguous.sizes(), contiguous.options().device(at::kCPU));
    to_host(contiguous, crossed, false);
    to.copy_(crossed);
    return;
  }
  const size_t nbytes = to.numel() * to.itemsize();
  auto& stream = current_stream(device);
  const bool pinned = is_pinned(to.data_ptr(), nbytes);
  if (!non_blocking || !pinned)
    may_wait("copy to the host and wait");
  void* target = to.data_ptr();
  stream.enqueue([&link = link_out(device), target, source = accessible(from.data_ptr()), nbytes] {
    carry(link, target, source, nbytes);
  });
  if (pinned)
    record_host_use(target, stream);
  if (!non_blocking || !pinned)
    synchronize(stream);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0)
    return to;
  at::assert_no_internal_overlap(to); // here, and not when the copy runs
  const auto from = self.sizes() == to.sizes() ? self : self.expand_as(to);
  c10::OptionalDeviceGuard guard(from.is_privateuseone() ? from.device() : to.device());
  if (from.is_privateuseone() && to.is_privateuseone())
    between_devices(from, to);
  else if (to.is_privateuseone())
    to_device(from, to, non_blocking);
  else
    to_host(from, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes())
    to.resize_(from.sizes());
  return copy_from(from, to, false);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

// Copies look to conjugation and sign themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace sim

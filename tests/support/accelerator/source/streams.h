// Streams: queues of work, each run in order by a thread of its own; places in them that events name; a device's links.
//
// Guarantees
// - Work of one stream runs in the order it was queued. Streams are ordered against each other by events alone: the
//   first stream of a device (id 0) orders nobody, as PyTorch's streams on CUDA do not wait for the legacy one.
// - A stream that waits for an event stands still until the place recorded last before the wait has been passed.
//   Waiting for an event never recorded is no waiting; recording again leaves earlier waits where they were.
// - `query` and `synchronize` see all that was queued before the call. What work throws is kept and thrown once, at the
//   next wait of the host for its device.
// - While a stream captures, what is queued on it, and on streams that wait for it, is not run but kept: a graph, whose
//   `replay` queues it in the order of the capture. What the host may not do meanwhile throws, with CUDA's code 900:
//   query, synchronize, anything that waits, on any thread. So does a captured stream's wait for an event from outside
//   (905), and later whatever asks for an event from inside (907). A graph captures on a stream of its own (ids above 32), so that its memory is nobody else's.
// - A forked child has none of the threads: whatever it asks of a stream throws, as CUDA does.
// Assumption: the process ends by `halt`.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace sim {

constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::StreamId kPool = 32; // ids 1 to 32 are handed out in turn, so that two askers may share one, as on CUDA
constexpr c10::StreamId kGraphs = 32; // ids 33 to 64 are for captures, one each

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

// Somewhere in a stream; passed once, for good.
class Place {
 public:
  explicit Place(bool captured) : captured(captured) {}
  bool passed() const { return passed_.load(std::memory_order_acquire); }
  void pass();
  void wait() const { passed_.wait(false, std::memory_order_acquire); }
  Clock::time_point time() const { return time_; } // of passing

  const bool captured; // recorded under capture

 private:
  std::atomic<bool> passed_{false};
  Clock::time_point time_;
};

using PlacePtr = std::shared_ptr<Place>;

class Stream {
 public:
  Stream(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) {}
  void enqueue(Work work, bool may_be_delayed = true);
  PlacePtr record();
  void wait(const PlacePtr& place); // makes the stream wait
  bool idle() const { return done_.load(std::memory_order_acquire) == queued_.load(std::memory_order_acquire); }
  void finish() const; // waits until all that is queued by now is done: `idle`, unless more has been queued since
  void delay(uint64_t seed, double at_most_s);

  const c10::DeviceIndex device;
  const c10::StreamId id;
  std::atomic<bool> captured{false};

 private:
  void run();

  std::mutex lock_;
  std::condition_variable filled_;
  std::deque<std::pair<Work, bool>> queue_;
  std::atomic<uint64_t> queued_{0}, done_{0}; // works, ever
  bool running_ = false;
  std::mt19937_64 chance_;
  double delay_s_ = 0;
};

// Bytes between a device and the host, one way: one copy at a time, as by a copy engine.
class Link {
 public:
  void set(double bytes_per_s, double latency_s); // 0: no limit
  // Moves [0, nbytes) by `move(begin, end)`: the first half at once, the other when the link's time is over. A reader
  // that does not wait, and a source that goes too early, both show.
  void carry(size_t nbytes, const std::function<void(size_t, size_t)>& move);
  size_t bytes() const { return bytes_; }
  size_t copies() const { return copies_; }

 private:
  std::mutex lock_;
  double bytes_per_s_ = 0, latency_s_ = 0;
  Clock::time_point free_at_{};
  std::atomic<size_t> bytes_{0}, copies_{0};
};

Stream& stream(c10::DeviceIndex device, c10::StreamId id);
Stream& stream(const c10::Stream& stream);
Stream& from_pool(c10::DeviceIndex device);
Link& link_in(c10::DeviceIndex device);
Link& link_out(c10::DeviceIndex device);

// The calling thread's.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
Stream& current_stream(c10::DeviceIndex device);
Stream& exchange_stream(Stream& stream);

// Waits of the host. They let go of Python's lock, refuse under capture and throw what the device's work has thrown.
void wait_for(const PlacePtr& place, c10::DeviceIndex device);
void synchronize(Stream& stream);
void synchronize(c10::DeviceIndex device);
void refuse_if_capturing(const char* what);
void refuse_if_captured(const Place& place);

using Graph = std::vector<Work>;
using GraphPtr = std::shared_ptr<Graph>;
GraphPtr begin_capture(Stream& stream);
void end_capture();
void replay(const GraphPtr& graph, Stream& stream);

// Whether operators that make the host wait throw, as `torch.cuda.set_sync_debug_mode("error")` has it.
void forbid_waits(bool forbidden);
void refuse_if_forbidden(const char* what);

void delays(uint64_t seed, double at_most_s); // for every stream, each with chances of its own
size_t hold(Stream& stream); // the stream stands still from here until `release` is called with the number returned
void release(size_t number);
bool forked(); // whether this process is the child of one that had the device
void halt(); // drops what is queued, for the end of the process

} // namespace sim

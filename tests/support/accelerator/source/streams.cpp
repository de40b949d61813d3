// Streams: see streams.h.
#include "streams.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <map>
#include <thread>

namespace sim {

namespace {

// All that lives as long as the process. Never destroyed: the threads outlive every destructor.
struct Streams {
  Streams() {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device)
      for (c10::StreamId id = 0; id <= kPool + kGraphs; ++id)
        streams[device][id] = std::make_unique<Stream>(device, id);
  }
  std::array<std::array<std::unique_ptr<Stream>, kPool + kGraphs + 1>, kDevices> streams;
  std::array<std::atomic<uint32_t>, kDevices> handed_out{};
  std::array<Link, kDevices> in, out;
  std::mutex lock;
  std::array<std::string, kDevices> thrown; // by work, not told yet
  std::map<size_t, PlacePtr> held;
  size_t holds = 0;
  GraphPtr graph; // of the capture under way
  std::atomic<bool> capturing{false}, halted{false}, waits_forbidden{false};
};

bool is_child = false;

Streams& all() {
  static auto* streams = [] {
    pthread_atfork(nullptr, nullptr, [] { is_child = true; });
    return new Streams();
  }();
  return *streams;
}

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, kDevices> stream_now{};

// Whoever waits for a kernel that needs Python's lock must not have it.
class WithoutPython {
 public:
  WithoutPython() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_ != nullptr)
      PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

void tell(c10::DeviceIndex device) {
  std::string words;
  {
    std::lock_guard guard(all().lock);
    words.swap(all().thrown[device]);
  }
  TORCH_CHECK(words.empty(), "sim: work queued earlier has failed: ", words);
}

void keep(c10::DeviceIndex device, const char* words) {
  std::lock_guard guard(all().lock);
  if (all().thrown[device].empty())
    all().thrown[device] = words;
}

void refuse_in_a_child() {
  TORCH_CHECK(!is_child, "sim: cannot be used in a forked child of a process that has it; use spawn");
}

[[noreturn]] void fail(int32_t code, const std::string& words) {
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code, words);
}

} // namespace

void Place::pass() {
  time_ = Clock::now();
  passed_.store(true, std::memory_order_release);
  passed_.notify_all();
}

void Stream::enqueue(Work work, bool may_be_delayed) {
  refuse_in_a_child();
  if (captured) {
    std::lock_guard guard(all().lock);
    if (all().graph != nullptr) {
      all().graph->push_back(std::move(work));
      return;
    }
  }
  std::lock_guard guard(lock_);
  if (!running_) {
    running_ = true;
    std::thread([this] { run(); }).detach();
  }
  ++queued_;
  queue_.emplace_back(std::move(work), may_be_delayed);
  filled_.notify_one();
}

void Stream::finish() const {
  const uint64_t queued = queued_;
  for (uint64_t done = done_; done < queued; done = done_)
    done_.wait(done);
}

PlacePtr Stream::record() {
  auto place = std::make_shared<Place>(captured.load());
  enqueue([place] { place->pass(); }, false);
  return place;
}

void Stream::wait(const PlacePtr& place) {
  if (place == nullptr)
    return;
  if (place->captured && !all().capturing)
    refuse_if_captured(*place);
  if (place->captured)
    captured = true; // the capture goes on here
  else if (captured)
    fail(905, "sim: a stream that captures may not wait for an event that was recorded outside of the capture");
  if (!place->passed())
    enqueue([place] { place->wait(); }, false);
}

void Stream::delay(uint64_t seed, double at_most_s) {
  std::lock_guard guard(lock_);
  chance_.seed(seed * 1000003 + device * 1009 + id);
  delay_s_ = at_most_s;
}

void Stream::run() {
  pthread_setname_np(pthread_self(), ("sim:" + std::to_string(device) + ":" + std::to_string(id)).c_str());
  for (;;) {
    std::pair<Work, bool> next;
    double pause_s = 0;
    {
      std::unique_lock guard(lock_);
      filled_.wait(guard, [this] { return !queue_.empty(); });
      next = std::move(queue_.front());
      queue_.pop_front();
      if (next.second && delay_s_ > 0)
        pause_s = std::max(0.0, std::uniform_real_distribution<>(-delay_s_, delay_s_)(chance_)); // none in half of all
    }
    if (all().halted)
      next.first = nullptr;
    if (pause_s > 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
    try {
      if (next.first)
        next.first();
    } catch (const c10::Error& error) {
      keep(device, error.what_without_backtrace());
    } catch (const std::exception& error) {
      keep(device, error.what());
    }
    next.first = nullptr;
    ++done_;
    done_.notify_all();
  }
}

void Link::set(double bytes_per_s, double latency_s) {
  std::lock_guard guard(lock_);
  bytes_per_s_ = bytes_per_s;
  latency_s_ = latency_s;
  free_at_ = {};
}

void Link::carry(size_t nbytes, const std::function<void(size_t, size_t)>& move) {
  Clock::time_point start, end;
  {
    std::lock_guard guard(lock_);
    start = std::max(Clock::now(), free_at_);
    const double takes_s = latency_s_ + (bytes_per_s_ > 0 ? nbytes / bytes_per_s_ : 0);
    end = free_at_ = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(takes_s));
  }
  std::this_thread::sleep_until(start);
  move(0, nbytes / 2);
  std::this_thread::sleep_until(end);
  move(nbytes / 2, nbytes);
  bytes_ += nbytes;
  ++copies_;
}

Stream& stream(c10::DeviceIndex device, c10::StreamId id) {
  TORCH_CHECK(device >= 0 && device < kDevices && id >= 0 && id <= kPool + kGraphs, "sim: no stream ", id, " of device ", +device);
  return *all().streams[device][id];
}

Stream& stream(const c10::Stream& one) {
  return stream(one.device_index(), one.id());
}

Stream& from_pool(c10::DeviceIndex device) {
  return stream(device, 1 + all().handed_out.at(device)++ % kPool);
}

Link& link_in(c10::DeviceIndex device) {
  return all().in.at(device);
}

Link& link_out(c10::DeviceIndex device) {
  return all().out.at(device);
}

c10::DeviceIndex current_device() {
  return device_now;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "sim: no device ", +device, "; there are ", +kDevices);
  return std::exchange(device_now, device);
}

Stream& current_stream(c10::DeviceIndex device) {
  return stream(device, stream_now.at(device));
}

Stream& exchange_stream(Stream& one) {
  return stream(one.device, std::exchange(stream_now.at(one.device), one.id));
}

void wait_for(const PlacePtr& place, c10::DeviceIndex device) {
  refuse_if_capturing("wait");
  if (place != nullptr)
    refuse_if_captured(*place);
  if (place != nullptr && !place->passed() && !all().halted) {
    WithoutPython none;
    place->wait();
  }
  tell(device);
}

void synchronize(Stream& one) {
  refuse_if_capturing("synchronize with a stream");
  if (!one.idle() && !all().halted) {
    refuse_in_a_child();
    WithoutPython none;
    one.finish();
  }
  tell(one.device);
}

void synchronize(c10::DeviceIndex device) {
  for (const auto& one : all().streams.at(device))
    synchronize(*one);
}

void refuse_if_capturing(const char* what) {
  if (all().capturing)
    fail(900, std::string("sim: operation not permitted when stream is capturing: ") + what);
}

void refuse_if_captured(const Place& place) {
  if (place.captured)
    fail(907, "sim: operation not permitted on an event last recorded in a capturing stream");
}

GraphPtr begin_capture(Stream& one) {
  TORCH_CHECK(one.id != 0, "sim: a capture must be on a stream that is not the device's first");
  TORCH_CHECK(!all().capturing.exchange(true), "sim: a stream is capturing already");
  std::lock_guard guard(all().lock);
  all().graph = std::make_shared<Graph>();
  one.captured = true;
  return all().graph;
}

void end_capture() {
  for (const auto& device : all().streams)
    for (const auto& one : device)
      one->captured = false;
  std::lock_guard guard(all().lock);
  all().graph = nullptr;
  all().capturing = false;
}

void replay(const GraphPtr& graph, Stream& one) {
  for (size_t i = 0; i < graph->size(); ++i)
    one.enqueue([graph, i] { (*graph)[i](); });
}

void forbid_waits(bool forbidden) {
  all().waits_forbidden = forbidden;
}

void refuse_if_forbidden(const char* what) {
  TORCH_CHECK(!all().waits_forbidden, "sim: called a synchronizing operation: ", what);
}

void delays(uint64_t seed, double at_most_s) {
  for (const auto& device : all().streams)
    for (const auto& one : device)
      one->delay(seed, at_most_s);
}

size_t hold(Stream& one) {
  auto place = std::make_shared<Place>(false);
  std::lock_guard guard(all().lock);
  all().held[++all().holds] = place;
  one.enqueue([place] { place->wait(); }, false);
  return all().holds;
}

void release(size_t number) {
  std::lock_guard guard(all().lock);
  auto found = all().held.find(number);
  TORCH_CHECK(found != all().held.end(), "sim: nothing is held by ", number);
  found->second->pass();
  all().held.erase(found);
}

bool forked() {
  return is_child;
}

void halt() {
  all().halted = true;
  std::lock_guard guard(all().lock);
  for (const auto& held : all().held)
    held.second->pass();
  all().held.clear();
}

} // namespace sim

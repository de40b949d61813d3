// Device: see device.h.
#include "device.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <cstring>
#include <random>

namespace sim {

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

c10::Stream to_torch(const Stream& one) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, one.device), one.id);
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

// An event in PyTorch's hands. Timed by its place whatever the flag; `elapsedTime` asks for the flag.
struct Event {
  PlacePtr place;
  bool timed;
  c10::DeviceIndex device;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kSim, exchange_device(index_of(device)));
  }
  c10::Device getDevice() const override { return c10::Device(kSim, current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(index_of(device)); }
  c10::Stream getStream(c10::Device device) const override { return to_torch(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return to_torch(stream(index_of(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return to_torch(from_pool(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return to_torch(from_pool(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream one) const override { return to_torch(exchange_stream(stream(one))); }
  void* getStreamNativeHandle(const c10::Stream one) const override { return &stream(one); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& one) const override {
    refuse_if_capturing("query a stream");
    return stream(one).idle();
  }
  void synchronizeStream(const c10::Stream& one) const override { synchronize(stream(one)); }
  bool isStreamCapturing(const c10::Stream& one) const override { return stream(one).captured; }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device); }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& one) const override {
    device_allocator().recordStream(ptr, one);
  }

  void record(void** event, const c10::Stream& one, const c10::DeviceIndex device, const c10::EventFlag flag)
      const override {
    TORCH_CHECK(device == -1 || device == one.device_index(), "sim: an event of device ", +device, " and a stream of another");
    if (*event == nullptr)
      *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT, one.device_index()};
    static_cast<Event*>(*event)->place = stream(one).record();
  }
  void block(void* event, const c10::Stream& one) const override {
    if (event != nullptr)
      stream(one).wait(static_cast<Event*>(event)->place);
  }
  bool queryEvent(void* event) const override {
    refuse_if_capturing("query an event");
    if (event == nullptr)
      return true;
    refuse_if_captured(*static_cast<Event*>(event)->place);
    return static_cast<Event*>(event)->place->passed();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr)
      wait_for(static_cast<Event*>(event)->place, static_cast<Event*>(event)->device);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return elapsed_ms(begin, end);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

uint64_t mixed(uint64_t seed, uint64_t draw) { // splitmix64
  uint64_t z = seed + 0x9E3779B97F4A7C15ull * (draw + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kSim; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    draws_ = 0;
  }
  void set_offset(uint64_t offset) override { draws_ = offset; }
  uint64_t get_offset() const override { return draws_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    std::random_device device;
    set_current_seed((static_cast<uint64_t>(device()) << 32 | device()) & 0x1FFFFFFFFFFFFFull);
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.is_cpu(),
                "sim: RNG state must be a torch.ByteTensor of ", kStateBytes, " bytes on the CPU");
    auto* from = static_cast<const char*>(state.data());
    std::memcpy(&seed_, from, 8);
    std::memcpy(&draws_, from + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({kStateBytes}, at::TensorOptions(at::kByte));
    auto* to = static_cast<char*>(state.data_ptr());
    std::memcpy(to, &seed_, 8);
    std::memcpy(to + 8, &draws_, 8);
    return state.getIntrusivePtr();
  }
  uint64_t take() { return mixed(seed_, draws_++); }

 private:
  static constexpr int64_t kStateBytes = 16;
  Generator* clone_impl() const override {
    auto* clone = new Generator(device().index());
    clone->seed_ = seed_;
    clone->draws_ = draws_;
    return clone;
  }
  uint64_t seed_ = c10::detail::getNonDeterministicRandom() & 0x1FFFFFFFFFFFFFull, draws_ = 0;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* made = new std::array<at::Generator, kDevices>([]<size_t... I>(std::index_sequence<I...>) {
      return std::array<at::Generator, kDevices>{at::make_generator<Generator>(static_cast<c10::DeviceIndex>(I))...};
    }(std::make_index_sequence<kDevices>()));
    return made->at(device == -1 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device == -1 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override { return at::Device(kSim, device_of(data)); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const auto device = index_of(storage.device());
    const c10::DeviceIndex before = exchange_device(device);
    auto memory = device_allocator().allocate(nbytes);
    exchange_device(before);
    if (const size_t kept = std::min(nbytes, storage.nbytes()); kept != 0)
      device_allocator().copy_data(memory.get(), storage.data(), kept);
    auto* changed = storage.unsafeGetStorageImpl();
    changed->set_data_ptr_noswap(std::move(memory));
    changed->set_nbytes(nbytes);
  }
};

// The engine makes its threads for devices once, at the first backward of the process: this may be after it.
struct Engine : torch::autograd::Engine {
  static void start(torch::autograd::Engine& engine) {
    engine.initialize_device_threads_pool();
    const size_t threads = (engine.*(&Engine::device_ready_queues_)).size();
    if (threads == 0)
      (engine.*(&Engine::start_device_threads))();
    TORCH_CHECK(threads == 0 || threads >= kDevices, "sim: autograd has threads for ", threads, " devices already");
  }
};

} // namespace

at::Generator default_generator(c10::DeviceIndex device) {
  return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
}

at::Generator for_next_draw(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  auto from = generator.has_value() && generator->defined() ? *generator : default_generator(device);
  auto* own = at::check_generator<Generator>(from);
  std::lock_guard guard(own->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(own->take());
}

double elapsed_ms(void* begin, void* end) {
  auto* first = static_cast<Event*>(begin);
  auto* last = static_cast<Event*>(end);
  TORCH_CHECK(first != nullptr && last != nullptr, "sim: both events must be recorded before elapsed time is asked for");
  TORCH_CHECK(first->timed && last->timed, "sim: both events must be made with enable_timing=True");
  TORCH_CHECK(first->place->passed() && last->place->passed(), "sim: device not ready: an event has not been passed yet");
  return std::chrono::duration<double, std::milli>(last->place->time() - first->place->time()).count();
}

void start_device() {
  static bool started = [] {
    c10::SetAllocator(kSim, &device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    c10::impl::registerDeviceGuard(kSim, new Guard());
    Engine::start(torch::autograd::Engine::get_default_engine());
    return true;
  }();
  (void)started;
}

} // namespace sim

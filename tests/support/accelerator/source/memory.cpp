// Memory: see memory.h.
#include "memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace sim {

namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr size_t kSpan = 64 * 1024 * kMiB; // addresses a device has; pages are there once touched
constexpr size_t kRound = 512, kSmall = kMiB, kSmallSegment = 2 * kMiB, kLargeSegment = 20 * kMiB;
constexpr size_t kOwnSegment = 10 * kMiB; // from this size on a segment is made to measure
constexpr int kPoison = 0xFF;

size_t round_up(size_t nbytes, size_t to) {
  return (nbytes + to - 1) / to * to;
}

// One file in memory, mapped twice.
struct Mapping {
  Mapping() {
    file = memfd_create("sim", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kDevices * kSpan) == 0, "sim: no memory file: ", std::strerror(errno));
    forbidden = map(PROT_NONE);
    open = map(PROT_READ | PROT_WRITE);
  }
  char* map(int rights) const {
    void* at = mmap(nullptr, kDevices * kSpan, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: cannot map device memory: ", std::strerror(errno));
    madvise(at, kDevices * kSpan, MADV_DONTDUMP);
    return static_cast<char*>(at);
  }
  void give_back(const char* begin, size_t nbytes) const {
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin - forbidden, nbytes);
  }
  int file;
  char* forbidden;
  char* open;
};

const Mapping& mapping() {
  static auto* mapping = new Mapping();
  return *mapping;
}

std::atomic<bool> poisoning{true};

struct Block {
  char* at;
  size_t size;
  Stream* stream;
  bool small; // in a segment for small blocks
  bool allocated = false;
  size_t requested = 0;
  size_t awaited = 0; // places that must be passed before the block is free
  std::unordered_set<Stream*> users;
  PlacePtr filled; // behind all that its stream does with the block, and its poison; none for a fresh one
  Block* before = nullptr; // neighbours in the segment
  Block* after = nullptr;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream->id, a->size, a->at) < std::tie(b->stream->id, b->size, b->at);
  }
};

using c10::CachingAllocator::StatArray;

void add(StatArray& stat, bool small, int64_t amount) {
  using c10::CachingAllocator::StatType;
  for (auto type : {StatType::AGGREGATE, small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    auto& one = stat[static_cast<size_t>(type)];
    if (amount >= 0)
      one.increase(amount);
    else
      one.decrease(-amount);
  }
}

// The blocks of one device. Its owner holds the lock.
class Pool {
 public:
  explicit Pool(c10::DeviceIndex device) : device_(device) {
    gaps_[mapping().forbidden + device * kSpan] = kSpan;
  }

  Block* take(size_t nbytes, Stream& stream) {
    const size_t size = round_up(std::max<size_t>(nbytes, 1), kRound);
    const bool small = size <= kSmall;
    Block* block = find(size, small, stream);
    if (block == nullptr && (block = make_segment(size, small, stream)) == nullptr)
      return nullptr;
    split(block, size);
    block->allocated = true;
    block->requested = nbytes;
    taken_[block->at] = block;
    add(stats.allocation, small, 1);
    add(stats.active, small, 1);
    add(stats.allocated_bytes, small, block->size);
    add(stats.active_bytes, small, block->size);
    add(stats.requested_bytes, small, nbytes);
    return block;
  }

  Block* taken(void* at) const {
    auto found = taken_.find(static_cast<char*>(at));
    TORCH_CHECK(found != taken_.end(), "sim: ", at, " is no block of device ", +device_);
    return found->second;
  }

  void put_back(Block* block) {
    taken_.erase(block->at);
    block->allocated = false;
    add(stats.allocation, block->small, -1);
    add(stats.allocated_bytes, block->small, -static_cast<int64_t>(block->size));
    add(stats.requested_bytes, block->small, -static_cast<int64_t>(block->requested));
    block->users.erase(block->stream);
    for (Stream* user : block->users) {
      ++block->awaited;
      awaited_.emplace_back(user->record(), block);
    }
    block->users.clear();
    if (block->awaited == 0)
      make_free(block);
  }

  // Frees the blocks whose streams have passed.
  void look() {
    for (auto it = awaited_.begin(); it != awaited_.end();) {
      if (!it->first->passed()) {
        ++it;
        continue;
      }
      Block* block = it->second;
      it = awaited_.erase(it);
      if (--block->awaited == 0)
        make_free(block);
    }
  }

  std::vector<PlacePtr> awaited() const {
    std::vector<PlacePtr> places;
    for (const auto& entry : awaited_)
      if (!entry.first->captured) // those are passed by a replay, if ever
        places.push_back(entry.first);
    return places;
  }

  // Gives free segments back to the system, but for those of which a stream has not let go yet.
  void give_back() {
    for (auto* pool : {&small_, &large_})
      for (auto it = pool->begin(); it != pool->end();) {
        Block* block = *it;
        ++it;
        if (block->before != nullptr || block->after != nullptr ||
            (block->filled != nullptr && !block->filled->passed()))
          continue;
        pool->erase(block);
        mapping().give_back(block->at, block->size);
        add(stats.segment, block->small, -1);
        add(stats.reserved_bytes, block->small, -static_cast<int64_t>(block->size));
        ++stats.num_device_free;
        add_gap(block->at, block->size);
        delete block;
      }
  }

  size_t reserved() const { return stats.reserved_bytes[0].current; }
  size_t allowed() const { return static_cast<size_t>(limit_bytes * share); }

  size_t limit_bytes = 4096 * kMiB;
  double share = 1;
  c10::CachingDeviceAllocator::DeviceStats stats;

 private:
  using Free = std::set<Block*, BySize>;
  Free& free_of(bool small) { return small ? small_ : large_; }

  Block* find(size_t size, bool small, Stream& stream) {
    Block key{nullptr, size, &stream, small};
    auto found = free_of(small).lower_bound(&key);
    if (found == free_of(small).end() || (*found)->stream != &stream)
      return nullptr;
    Block* block = *found;
    free_of(small).erase(found);
    if (block->before != nullptr || block->after != nullptr)
      note_split(block, -1);
    return block;
  }

  Block* make_segment(size_t size, bool small, Stream& stream) {
    const size_t nbytes = small ? kSmallSegment : size < kOwnSegment ? kLargeSegment : round_up(size, kSmallSegment);
    if (reserved() + nbytes > allowed())
      return nullptr;
    for (auto& [at, room] : gaps_) {
      if (room < nbytes)
        continue;
      char* begin = at;
      const size_t rest = room - nbytes;
      gaps_.erase(begin);
      if (rest != 0)
        gaps_[begin + nbytes] = rest;
      add(stats.segment, small, 1);
      add(stats.reserved_bytes, small, nbytes);
      ++stats.num_device_alloc;
      if (poisoning)
        std::memset(accessible(begin), kPoison, nbytes); // nobody's yet, so at once
      return new Block{begin, nbytes, &stream, small};
    }
    return nullptr;
  }

  void add_gap(char* at, size_t nbytes) {
    auto next = gaps_.emplace(at, nbytes).first;
    if (auto right = std::next(next); right != gaps_.end() && next->first + next->second == right->first) {
      next->second += right->second;
      gaps_.erase(right);
    }
    if (next != gaps_.begin())
      if (auto left = std::prev(next); left->first + left->second == next->first) {
        left->second += next->second;
        gaps_.erase(next);
      }
  }

  void split(Block* block, size_t size) {
    const size_t rest = block->size - size;
    if (block->small ? rest < kRound : rest <= kSmall)
      return;
    auto* right = new Block{block->at + size, rest, block->stream, block->small};
    right->before = block;
    right->after = block->after;
    right->filled = block->filled;
    if (right->after != nullptr)
      right->after->before = right;
    block->after = right;
    block->size = size;
    free_of(right->small).insert(right);
    note_split(right, 1);
  }

  void note_split(const Block* block, int64_t sign) {
    add(stats.inactive_split, block->small, sign);
    add(stats.inactive_split_bytes, block->small, sign * static_cast<int64_t>(block->size));
  }

  void make_free(Block* block) {
    add(stats.active, block->small, -1);
    add(stats.active_bytes, block->small, -static_cast<int64_t>(block->size));
    fill(*block);
    for (Block* other : {block->before, block->after})
      if (other != nullptr && !other->allocated && other->awaited == 0)
        merge(block, other);
    if (block->before != nullptr || block->after != nullptr)
      note_split(block, 1);
    free_of(block->small).insert(block);
  }

  void merge(Block* block, Block* other) {
    free_of(other->small).erase(other);
    note_split(other, -1);
    if (other == block->before) {
      block->at = other->at;
      block->before = other->before;
      if (block->before != nullptr)
        block->before->after = block;
    } else {
      block->after = other->after;
      if (block->after != nullptr)
        block->after->before = block;
    }
    block->size += other->size;
    delete other;
  }

  static void fill(Block& block) {
    block.filled = std::make_shared<Place>(false);
    auto work = [at = accessible(block.at), size = block.size, place = block.filled] {
      if (poisoning)
        std::memset(at, kPoison, size);
      place->pass();
    };
    block.stream->enqueue(std::move(work), false);
  }

  const c10::DeviceIndex device_;
  std::map<char*, size_t> gaps_; // addresses without a segment
  std::unordered_map<char*, Block*> taken_;
  Free small_, large_;
  std::list<std::pair<PlacePtr, Block*>> awaited_; // freed, but recorded on a stream that has not passed yet
};

struct Device {
  explicit Device(c10::DeviceIndex device) : pool(device) {}
  std::mutex lock;
  Pool pool;
};

Device& device(c10::DeviceIndex index) {
  static auto* devices = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>();
    for (c10::DeviceIndex one = 0; one < kDevices; ++one)
      made->push_back(std::make_unique<Device>(one));
    return made;
  }();
  return *devices->at(index);
}

void free_block(void* at) {
  if (at == nullptr || forked()) // a child has no streams, and keeps its blocks
    return;
  auto& owner = device(device_of(at));
  std::lock_guard guard(owner.lock);
  owner.pool.put_back(owner.pool.taken(at));
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const auto index = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, index);
    if (nbytes == 0)
      return {nullptr, nullptr, &free_block, where};
    void* at = take(index, nbytes);
    return {at, at, &free_block, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    current_stream(device_of(to)).enqueue(
        [to = accessible(to), from = accessible(from), nbytes] { std::memcpy(to, from, nbytes); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex index = 0; index < kDevices; ++index)
      give_back(index);
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream one) override {
    if (ptr.get() != nullptr && ptr.get_deleter() == &free_block) // others' memory is passed over, as on CUDA
      record_use(ptr.get_context(), stream(one));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    auto& owner = device(index);
    std::lock_guard guard(owner.lock);
    return owner.pool.stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    each_stat(index, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    each_stat(index, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    auto& owner = device(index);
    std::lock_guard guard(owner.lock);
    const size_t total = owner.pool.limit_bytes, used = owner.pool.reserved();
    return {total > used ? total - used : 0, total};
  }

 private:
  void* take(c10::DeviceIndex index, size_t nbytes) {
    auto& owner = device(index);
    auto& one = current_stream(index);
    {
      std::lock_guard guard(owner.lock);
      owner.pool.look();
      if (Block* block = owner.pool.take(nbytes, one))
        return block->at;
      ++owner.pool.stats.num_alloc_retries;
    }
    give_back(index);
    std::lock_guard guard(owner.lock);
    if (Block* block = owner.pool.take(nbytes, one))
      return block->at;
    auto& pool = owner.pool;
    ++pool.stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim out of memory. Tried to allocate ", nbytes, " bytes. Device ", +index, " may use ",
        pool.allowed(), " bytes, has reserved ", pool.reserved(), " and allocated ",
        pool.stats.allocated_bytes[0].current, ".");
  }

  // Waits without a lock, as what is waited for may need one.
  static void give_back(c10::DeviceIndex index) {
    auto& owner = device(index);
    std::vector<PlacePtr> places;
    {
      std::lock_guard guard(owner.lock);
      places = owner.pool.awaited();
    }
    for (const auto& place : places)
      wait_for(place, index);
    {
      std::lock_guard guard(owner.lock);
      owner.pool.look();
    }
    synchronize(index);
    std::lock_guard guard(owner.lock);
    owner.pool.give_back();
  }

  template <typename Change>
  static void each_stat(c10::DeviceIndex index, const Change& change) {
    auto& owner = device(index);
    std::lock_guard guard(owner.lock);
    auto& stats = owner.pool.stats;
    for (auto* array :
         {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
          &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes})
      for (auto& stat : *array)
        change(stat);
  }
};

// Pinned memory. Blocks are of powers of two and kept for the next who asks.
class HostMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0)
      return {nullptr, nullptr, &free_host, c10::Device(c10::DeviceType::CPU)};
    size_t size = 4096;
    while (size < nbytes)
      size *= 2;
    void* at = take(size);
    return {at, at, &free_host, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

  bool holds(const void* address, size_t nbytes) {
    std::lock_guard guard(lock_);
    return find(blocks_, address, nbytes) != blocks_.end() || find(registered_, address, nbytes) != registered_.end();
  }

  void use(const void* address, Stream& one) {
    std::lock_guard guard(lock_);
    auto found = find(blocks_, address, 1);
    if (found != blocks_.end())
      found->second.places.push_back(one.record());
  }

  void put_back(void* at) {
    std::lock_guard guard(lock_);
    blocks_.at(static_cast<char*>(at)).free = true;
  }

  void add(void* at, size_t nbytes) {
    std::lock_guard guard(lock_);
    auto* begin = static_cast<char*>(at);
    auto next = registered_.lower_bound(begin);
    bool overlaps = next != registered_.end() && next->first < begin + nbytes;
    if (next != registered_.begin()) {
      auto before = std::prev(next);
      overlaps |= before->first + before->second.size > begin;
    }
    TORCH_CHECK(!overlaps, "sim: part or all of the requested memory range is already mapped");
    registered_[begin].size = nbytes;
  }

  void remove(void* at) {
    std::lock_guard guard(lock_);
    TORCH_CHECK(registered_.erase(static_cast<char*>(at)) == 1, "sim: pointer does not correspond to a registered memory region");
  }

 private:
  struct HostBlock {
    size_t size = 0;
    bool free = false;
    std::vector<PlacePtr> places; // behind the copies that use it
  };
  using Blocks = std::map<char*, HostBlock>;

  static void free_host(void* at);

  static Blocks::iterator find(Blocks& blocks, const void* address, size_t nbytes) {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto found = blocks.upper_bound(at);
    if (found == blocks.begin())
      return blocks.end();
    --found;
    return at + nbytes <= found->first + found->second.size ? found : blocks.end();
  }

  void* take(size_t size) {
    std::lock_guard guard(lock_);
    for (auto& [at, block] : blocks_) {
      if (!block.free || block.size != size)
        continue;
      if (std::any_of(block.places.begin(), block.places.end(), [](const auto& place) { return !place->passed(); }))
        continue;
      block.free = false;
      block.places.clear();
      if (poisoning)
        std::memset(at, kPoison, size);
      return at;
    }
    void* at = nullptr;
    TORCH_CHECK(posix_memalign(&at, 4096, size) == 0, "sim: no pinned memory of ", size, " bytes");
    if (poisoning)
      std::memset(at, kPoison, size);
    blocks_[static_cast<char*>(at)].size = size;
    return at;
  }

  std::mutex lock_;
  Blocks blocks_, registered_;
};

HostMemory& host() {
  static auto* memory = new HostMemory();
  return *memory;
}

void HostMemory::free_host(void* at) {
  if (at != nullptr && !forked())
    host().put_back(at);
}

} // namespace

bool is_of_device(const void* address) {
  auto* at = static_cast<const char*>(address);
  return at >= mapping().forbidden && at < mapping().forbidden + kDevices * kSpan;
}

c10::DeviceIndex device_of(const void* address) {
  TORCH_CHECK(is_of_device(address), "sim: ", address, " is no address of a device");
  return static_cast<c10::DeviceIndex>((static_cast<const char*>(address) - mapping().forbidden) / kSpan);
}

void* accessible(const void* address) {
  if (address == nullptr)
    return nullptr;
  TORCH_CHECK(is_of_device(address), "sim: ", address, " is no address of a device");
  return mapping().open + (static_cast<const char*>(address) - mapping().forbidden);
}

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceMemory();
  return *allocator;
}

c10::Allocator& host_allocator() {
  return host();
}

void record_use(void* address, Stream& one) {
  auto& owner = device(device_of(address));
  std::lock_guard guard(owner.lock);
  owner.pool.taken(address)->users.insert(&one);
}

void limit(c10::DeviceIndex index, size_t nbytes) {
  TORCH_CHECK(nbytes <= kSpan, "sim: a device has ", kSpan, " bytes of addresses, and no ", nbytes);
  std::lock_guard guard(device(index).lock);
  device(index).pool.limit_bytes = nbytes;
}

size_t limit(c10::DeviceIndex index) {
  std::lock_guard guard(device(index).lock);
  return device(index).pool.limit_bytes;
}

void fraction(c10::DeviceIndex index, double share) {
  std::lock_guard guard(device(index).lock);
  device(index).pool.share = share;
}

double fraction(c10::DeviceIndex index) {
  std::lock_guard guard(device(index).lock);
  return device(index).pool.share;
}

void poison(bool on) {
  poisoning = on;
}

bool is_pinned(const void* address, size_t nbytes) {
  return host().holds(address, nbytes);
}

void record_host_use(const void* address, Stream& one) {
  host().use(address, one);
}

void host_register(void* address, size_t nbytes) {
  host().add(address, nbytes);
}

void host_unregister(void* address) {
  host().remove(address);
}

} // namespace sim

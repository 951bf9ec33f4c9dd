// Streams without a device. Every operation runs when it is issued, so the results never depend on
// a race. What is late is knowledge: each stream, each event and the host has a vector clock, the
// newest operation of every stream that it knows to be finished. An access to memory that another
// stream uses and that is not ordered by events is reported, and the host sees what a copy brings
// only after it has waited for the copy.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace hostcuda {

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<StreamKey, int64_t>;

inline std::string describe(StreamKey stream) {
  return "stream " + std::to_string(stream.second) + " of cuda:" + std::to_string(stream.first);
}
inline void merge(Clock& into, const Clock& other) {
  for (auto& [stream, tick] : other) into[stream] = std::max(into[stream], tick);
}
inline bool knows(const Clock& clock, StreamKey stream, int64_t tick) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= tick;
}

struct Access {
  int64_t tick = 0;
  std::string operation;
};
// Accesses to one storage: the newest of every stream, and the newest write.
struct StorageRecord {
  StreamKey owner;  // freed memory is reused on this stream at once
  StreamKey writer;
  Access write;
  std::map<StreamKey, Access> accesses;
  std::set<StreamKey> recorded;  // by record_stream: the allocator waits for them
};

class Streams {
 public:
  static Streams& get() {
    static auto* streams = new Streams;  // tensors are freed after static objects
    return *streams;
  }

  // Start an operation: it runs after everything that its stream and the host know.
  int64_t begin(StreamKey stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& clock = clocks_[stream];
    merge(clock, host_);
    return ++clock[stream];
  }

  void access(StorageRecord& storage, StreamKey stream, int64_t tick, const std::string& name,
              bool is_write) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto& clock = clocks_[stream];
    auto check = [&](StreamKey other, const Access& access, const char* verb) {
      if (other == stream || access.tick == 0 || knows(clock, other, access.tick))
        return;
      TORCH_CHECK(false, "missing event: ", name, " on ", describe(stream),
                  is_write ? " writes" : " reads", " memory that ", access.operation, " on ",
                  describe(other), verb, "; nothing orders them");
    };
    check(storage.writer, storage.write, " writes");
    if (is_write)
      for (auto& [other, access] : storage.accesses) check(other, access, " uses");
    storage.accesses[stream] = {tick, name};
    if (is_write) {
      storage.writer = stream;
      storage.write = {tick, name};
    }
  }

  // The caching allocator gives freed memory to later allocations on the owner's stream, which by
  // then must know that the uses on other streams are finished, or record_stream tells it.
  void release(const StorageRecord& storage, size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    FreedMemory freed{size, {}};
    for (auto& [stream, access] : storage.accesses)
      if (stream != storage.owner && !storage.recorded.count(stream))
        freed.accesses[stream] = access;
    if (!freed.accesses.empty()) freed_[storage.owner].push_back(std::move(freed));
  }
  void allocate(StreamKey owner, size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    Clock clock = clocks_[owner];
    merge(clock, host_);
    std::vector<FreedMemory> rest;
    for (auto& freed : freed_[owner]) {
      std::erase_if(freed.accesses, [&](const auto& use) {
        return knows(clock, use.first, use.second.tick);
      });
      if (freed.accesses.empty()) continue;
      if (size > freed.size) {
        rest.push_back(std::move(freed));
        continue;
      }
      auto& [stream, access] = *freed.accesses.begin();
      violations_.push_back("missing record_stream: freed memory of " + describe(owner) +
                            " may be used again while " + access.operation + " on " +
                            describe(stream) + " uses it");
    }
    freed_[owner] = std::move(rest);
  }

  Clock record(StreamKey stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& clock = clocks_[stream];
    merge(clock, host_);
    ++clock[stream];
    return clock;
  }
  void wait(StreamKey stream, const Clock& event) {
    std::lock_guard<std::mutex> guard(mutex_);
    merge(clocks_[stream], event);
  }

  // The host knows that these operations are finished. Deliver what they bring to the host.
  void host_waits(const Clock& event) {
    deliver_where([&](const Delivery& delivery) {
      return knows(host_, delivery.stream, delivery.tick);
    }, &event);
  }
  void host_waits_for(StreamKey stream) { host_waits(record(stream)); }
  void host_waits_for_device(c10::DeviceIndex device) {
    std::vector<StreamKey> streams;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      for (auto& [stream, clock] : clocks_)
        if (stream.first == device) streams.push_back(stream);
    }
    for (auto stream : streams) host_waits_for(stream);
  }
  void deliver_later(StreamKey stream, int64_t tick, std::function<void()> deliver,
                     bool is_read = false) {
    std::lock_guard<std::mutex> guard(mutex_);
    deliveries_.push_back({stream, tick, std::move(deliver), is_read});
  }
  // Copies from (`is_read`) or to pinned memory that this stream has waited for are finished for
  // what runs on it next.
  void finish_copies(StreamKey stream, bool is_read) {
    deliver_where([&](const Delivery& delivery) {
      return delivery.is_read == is_read && knows(clocks_[stream], delivery.stream, delivery.tick);
    });
  }

  void report(const std::string& violation) {
    std::lock_guard<std::mutex> guard(mutex_);
    violations_.push_back(violation);
  }
  std::string take_violation() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (violations_.empty()) return "";
    auto violation = violations_.back();
    violations_.pop_back();
    return violation;
  }

 private:
  struct Delivery {
    StreamKey stream;
    int64_t tick;
    std::function<void()> deliver;
    bool is_read;  // a check that a read of pinned memory was not disturbed
  };
  struct FreedMemory {
    size_t size;
    std::map<StreamKey, Access> accesses;
  };
  // One thread at a time: whoever waits for a copy that another thread delivers sees it complete.
  template <typename Condition>
  void deliver_where(Condition&& is_due, const Clock* event = nullptr) {
    std::vector<std::function<void()>> due;  // freed without a lock: tensors may need the GIL
    std::lock_guard<std::mutex> delivery_guard(delivery_mutex_);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (event) merge(host_, *event);
      std::vector<Delivery> rest;
      for (auto& delivery : deliveries_)
        if (is_due(delivery))
          due.push_back(std::move(delivery.deliver));
        else
          rest.push_back(std::move(delivery));
      deliveries_ = std::move(rest);
    }
    for (auto& deliver : due) deliver();
  }
  std::mutex delivery_mutex_;
  std::mutex mutex_;
  std::map<StreamKey, std::vector<FreedMemory>> freed_;
  std::map<StreamKey, Clock> clocks_;
  Clock host_;
  std::vector<Delivery> deliveries_;
  std::vector<std::string> violations_;
};

}  // namespace hostcuda

// Memory of the device (the host's, counted and filled with NaN) and pinned memory.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <cstring>

#include "streams.h"

namespace hostcuda {

constexpr auto kCuda = c10::DeviceType::CUDA;
constexpr int kNumDevices = 8;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local c10::StreamId current_streams[kNumDevices] = {};
inline StreamKey current_stream(c10::DeviceIndex device) { return {device, current_streams[device]}; }

inline std::atomic<int64_t> live_bytes{0}, peak_bytes{0};
inline void count_bytes(int64_t size) {
  const auto now = live_bytes += size;
  for (auto peak = peak_bytes.load(); now > peak && !peak_bytes.compare_exchange_weak(peak, now);) {
  }
}

// Context of a device storage's pointer. `keep` is the CPU storage that owns the memory, if one
// does: CPU kernels allocate their results.
struct Block {
  void* data;
  size_t size;
  c10::Storage keep;
  StorageRecord record;
};
inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Streams::get().release(block->record, block->size);
  count_bytes(-static_cast<int64_t>(block->size));
  if (!block->keep) free(block->data);
  delete block;
}
inline c10::DataPtr make_pointer(void* data, size_t size, c10::Storage keep, c10::Device device) {
  count_bytes(static_cast<int64_t>(size));
  const auto owner = current_stream(device.index());
  Streams::get().allocate(owner, size);
  auto* block = new Block{data, size, std::move(keep), {owner, {}, {}, {}, {}}};
  return {data, block, &free_block, device};
}
inline Block* find_block(const c10::Storage& storage) {
  return storage.data_ptr().get_deleter() == &free_block
      ? static_cast<Block*>(storage.data_ptr().get_context())
      : nullptr;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kCuda, current_device);
    if (!size) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    void* data = nullptr;
    TORCH_CHECK(!posix_memalign(&data, 512, size), "CUDA out of memory (of the host)");
    memset(data, 0xFF, size);  // unwritten floating-point memory is NaN
    return make_pointer(data, size, {}, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline DeviceAllocator device_allocator;

inline std::mutex pinned_mutex;
inline std::map<char*, size_t> pinned_blocks;
inline void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned_blocks.erase(static_cast<char*>(data));
  }
  free(data);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    TORCH_CHECK(!posix_memalign(&data, 512, size ? size : 1), "no host memory");
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned_blocks[static_cast<char*>(data)] = size ? size : 1;
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline PinnedAllocator pinned_allocator;
inline bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto* place = static_cast<char*>(const_cast<void*>(data));
  auto next = pinned_blocks.upper_bound(place);
  return next != pinned_blocks.begin() && place < std::prev(next)->first + std::prev(next)->second;
}

}  // namespace hostcuda

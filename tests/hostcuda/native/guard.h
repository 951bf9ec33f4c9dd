// What torch's C++ asks of CUDA: the device guard (devices, streams, events) and CUDAHooks.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generator.h"

namespace at {
// The registry's key is the class name, and ATen looks up "CUDAHooks" (in namespace at).
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return hostcuda::kNumDevices; }
  int getNumGPUs() const override { return hostcuda::kNumDevices; }
  bool isPinnedPtr(const void* data) const override { return hostcuda::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &hostcuda::pinned_allocator; }
  Generator getNewGenerator(DeviceIndex device) const override {
    return hostcuda::make_generator(device);
  }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return hostcuda::get_default_generator(device);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace hostcuda {

void log_synchronisation(const std::string& operation);

inline StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

  c10::DeviceType type() const override { return kCuda; }
  Device getDevice() const override { return Device(kCuda, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  Device resolve(Device device) const { return device.index() < 0 ? getDevice() : device; }
  Stream getStream(Device device) const override {
    const auto here = resolve(device);
    return Stream(Stream::UNSAFE, here, current_streams[here.index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, resolve(device));
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return Stream(Stream::UNSAFE, resolve(device), next++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    Streams::get().host_waits_for(key_of(stream));
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    log_synchronisation("stream.synchronize");
    Streams::get().host_waits_for(key_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    log_synchronisation("synchronize");
    Streams::get().host_waits_for_device(device);
  }

  // An event is the clock of the stream that recorded it.
  void record(void** event, const Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Clock;
    *static_cast<Clock*>(*event) = Streams::get().record(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) Streams::get().wait(key_of(stream), *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    if (event) Streams::get().host_waits(*static_cast<Clock*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    log_synchronisation("event.synchronize");
    queryEvent(event);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    if (pointer.get_deleter() == &free_block)
      static_cast<Block*>(pointer.get_context())->record.recorded.insert(key_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace hostcuda

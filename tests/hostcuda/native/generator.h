// Random generators of the devices. Each has a generator of the CPU, whose kernels draw the numbers.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <array>

#include "memory.h"

namespace hostcuda {

struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex device, at::Generator host)
      : GeneratorImpl(c10::Device(kCuda, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  // The state itself, not a copy: both generators go on from it.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto* other = dynamic_cast<DeviceGenerator*>(state.get());
    TORCH_CHECK(other, "the state of a CUDA generator must be that of a CUDA generator");
    host = other->host;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<DeviceGenerator>(device().index(), host);
  }

  at::Generator host;

 private:
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), host.clone());
  }
};

inline at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device : device,
                                             at::detail::createCPUGenerator());
}
// Python creates them, as `torch.cuda.default_generators`.
inline std::array<at::Generator, kNumDevices> default_generators;
inline const at::Generator& get_default_generator(c10::DeviceIndex device) {
  return default_generators[device < 0 ? current_device : device];
}

// Return the CPU's generator that an operation on a device draws from.
inline at::Generator get_host_generator(const c10::IValue& value, c10::DeviceIndex device) {
  const auto generator = value.isNone() ? get_default_generator(device) : value.toGenerator();
  TORCH_CHECK(generator.device().type() == kCuda,
              "Expected a 'cuda' device type for generator but found '", generator.device().type(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

}  // namespace hostcuda

// "cuda" without a GPU: a device type whose memory is the host's and whose kernels are the CPU's.
// It registers what a CPU build of torch leaves empty, so it is loaded before `import torch`.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

#include "attention_choice.h"
#include "guard.h"
#include "without_kernel.h"  // kWithoutKernel: operators that have a CPU kernel and no CUDA kernel

namespace hostcuda {

using at::Tensor;
using torch::jit::Stack;

// ---- Log of host synchronisations; Python adds the line.
using Listener = void (*)(const char*);
std::atomic<Listener> listener{nullptr};
void log_synchronisation(const std::string& operation) {
  if (auto call = listener.load()) call(operation.c_str());
}

// ---- Storages of the same memory on the other device type.
void delete_storage(void* context) { delete static_cast<c10::Storage*>(context); }
c10::Storage make_storage(size_t size, c10::DataPtr pointer, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size, std::move(pointer), allocator, true));
}
c10::Storage make_host_alias(const c10::Storage& storage) {
  c10::DataPtr pointer(storage.mutable_data(), new c10::Storage(storage), &delete_storage,
                       c10::Device(c10::kCPU));
  return make_storage(storage.nbytes(), std::move(pointer), c10::GetAllocator(c10::kCPU));
}
c10::DataPtr make_device_pointer(const c10::Storage& host, c10::DeviceIndex device) {
  return make_pointer(host.mutable_data(), host.nbytes(), host, c10::Device(kCuda, device));
}
Tensor make_tensor_like(const Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                      tensor.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  return out;
}
size_t count_used_bytes(const Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                          tensor.storage_offset());
}

// ---- One operation on host aliases of its device tensors.
class Call {
 public:
  Call(std::string name, c10::DeviceIndex device)
      : name_(std::move(name)),
        device_(device),
        stream_(current_stream(device)),
        tick_(Streams::get().begin(stream_)) {}

  Tensor to_host(const Tensor& tensor, bool is_write) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    const auto& storage = tensor.storage();
    TORCH_CHECK(tensor.numel() == 0 || storage.nbytes() >= count_used_bytes(tensor),
                "CUDA error: an illegal memory access was encountered (", name_, ": a tensor of ",
                tensor.sizes(), " in a storage of ", storage.nbytes(), " bytes: is it freed?)");
    if (auto* block = tensor.numel() ? find_block(storage) : nullptr)
      Streams::get().access(block->record, stream_, tick_, name_, is_write);
    auto& host = host_storages_[storage.unsafeGetStorageImpl()];
    if (!host) {
      host = make_host_alias(storage);
      device_storages_[host.unsafeGetStorageImpl()] = storage;
    }
    aliases_.emplace_back(tensor, make_tensor_like(tensor, host, c10::DispatchKey::CPU));
    return aliases_.back().second;
  }

  // A result is an argument, a view of one, or new.
  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [device, host] : aliases_)
      if (host.is_same(tensor)) return device;
    auto& storage = device_storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = make_storage(tensor.storage().nbytes(), make_device_pointer(tensor.storage(), device_),
                             &device_allocator);
      if (auto* block = find_block(storage))
        Streams::get().access(block->record, stream_, tick_, name_, true);
    }
    return make_tensor_like(tensor, storage, c10::DispatchKey::CUDA);
  }

  // Give arguments that the operation resized or moved (`out=`) their new sizes and memory.
  void update_arguments() {
    for (auto& [device, host] : aliases_) {
      auto device_storage = device.storage();
      const auto& host_storage = host.storage();
      if (host_storage.mutable_data() != device_storage.mutable_data() ||
          host_storage.nbytes() != device_storage.nbytes()) {
        device_storage.set_data_ptr_noswap(make_device_pointer(host_storage, device.device().index()));
        device_storage.set_nbytes(host_storage.nbytes());
      }
      auto* impl = device.unsafeGetTensorImpl();
      if (host.sizes() != device.sizes() || host.strides() != device.strides())
        impl->set_sizes_and_strides(host.sizes(), host.strides());
      if (host.storage_offset() != device.storage_offset())
        impl->set_storage_offset(host.storage_offset());
    }
  }

  int64_t tick() const { return tick_; }
  StreamKey stream() const { return stream_; }

 private:
  std::string name_;
  c10::DeviceIndex device_;
  StreamKey stream_;
  int64_t tick_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_, device_storages_;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // (device tensor, host alias)
};

// ---- Rules of CUDA that the CPU's kernels do not have.
const std::unordered_set<std::string> kMixedDevices{  // index tensors may be on the host
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_copy_"};
const std::unordered_set<std::string> kProducts{
    "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_",
    "aten::mv", "aten::addmv", "aten::addmv_", "aten::dot", "aten::vdot", "aten::_grouped_mm"};
const std::unordered_set<std::string> kSynchronising{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal"};

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function&& call) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) call(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) for_each_tensor(element, call);
  }
}
template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, Function&& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor tensor : value.toTensorList()) out.push_back(convert(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      out.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
    return out;
  }
  if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    c10::impl::GenericList out(c10::ListType::ofTensors());
    for (const auto& row : value.toListRef()) out.push_back(map_tensors(row, convert));
    return out;
  }
  return value;
}

void check_kernel(const c10::OperatorName& overload, const Tensor& first) {
  const auto& name = overload.name;
  TORCH_CHECK_NOT_IMPLEMENTED(!kWithoutKernel.count(c10::toString(overload)), "Could not run '", name,
                              "' with arguments from the 'CUDA' backend: it has no CUDA kernel");
  TORCH_CHECK_NOT_IMPLEMENTED(!first.defined() || !kProducts.count(name) ||
                                  at::isFloatingType(first.scalar_type()) ||
                                  at::isComplexType(first.scalar_type()),
                              "\"", name, "\" (CUDA) not implemented for '",
                              at::toString(first.scalar_type()), "'");
}
c10::Device check_devices(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& value : arguments)
    for_each_tensor(value, [&](const Tensor& tensor) {
      if (tensor.is_cuda() && !device) device = tensor.device();
    });
  const auto here = device.value_or(c10::Device(kCuda, current_device));
  const bool is_mixed = kMixedDevices.count(name);
  for (const auto& value : arguments)
    for_each_tensor(value, [&](const Tensor& tensor) {
      const bool is_scalar = tensor.is_cpu() && tensor.dim() == 0;
      TORCH_CHECK(tensor.device() == here || is_scalar || (is_mixed && tensor.is_cpu()),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  here, " and ", tensor.device(), "! (", name, ")");
    });
  TORCH_CHECK(!is_mixed || !arguments[0].isTensor() || arguments[0].toTensor().is_cuda(),
              "indices should be either on cpu or on the same device as the indexed tensor (", name,
              ")");
  return here;
}
// Return what makes the host wait, or "".
std::string find_synchronisation(const c10::FunctionSchema& schema,
                                 c10::ArrayRef<c10::IValue> arguments) {
  const auto& name = schema.name();
  if (kSynchronising.count(name)) return name;
  if (name == "aten::repeat_interleave" && schema.overload_name() == "Tensor" &&
      arguments[1].isNone())
    return name + " without output_size";
  if (name == "aten::_grouped_mm" && arguments[0].toTensor().scalar_type() != at::kBFloat16)
    return name + " in another dtype than bfloat16 (reads its offsets)";
  // `index` itself calls nonzero for a mask, and copies indices to the device.
  if (name != "aten::index" && kMixedDevices.count(name) && arguments[1].isOptionalTensorList())
    for (const std::optional<Tensor> index : arguments[1].toOptionalTensorList())
      if (index && index->defined()) {
        if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)
          return name + " with a mask";
        if (index->is_cpu()) return name + " with an index on the host";
      }
  return "";
}

const c10::TypePtr kOptionalGenerator = c10::OptionalType::create(c10::GeneratorType::get());

// ---- Every operator without a kernel of its own here: the CPU's kernel on host aliases.
void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto num_arguments = schema.arguments().size();
  const auto begin = stack->size() - num_arguments;
  const auto arguments = torch::jit::last(*stack, num_arguments);
  Tensor first;
  for (const auto& value : arguments)
    for_each_tensor(value, [&](const Tensor& tensor) {
      if (!first.defined()) first = tensor;
    });
  check_kernel(op.operator_name(), first);
  auto device = check_devices(name, arguments);
  for (const auto& value : arguments)
    if (value.isDevice() && value.toDevice().type() == kCuda && value.toDevice().has_index())
      device = value.toDevice();
  const auto synchronisation = find_synchronisation(schema, arguments);
  Call call(name, device.index());
  if (!synchronisation.empty()) {
    log_synchronisation(synchronisation);
    Streams::get().host_waits_for(call.stream());
  }
  const bool is_collective = name.rfind("c10d::", 0) == 0;
  for (size_t i = 0; i < num_arguments; i++) {
    auto& value = (*stack)[begin + i];
    if (value.isDevice() && value.toDevice().type() == kCuda) {
      value = c10::Device(c10::kCPU);
      continue;
    }
    const auto& argument = schema.arguments()[i];
    if (*argument.real_type() == *kOptionalGenerator) {
      value = get_host_generator(value, device.index());
      continue;
    }
    const auto* alias = argument.alias_info();
    const bool is_write = is_collective || (alias && alias->isWrite());
    value = map_tensors(value, [&](const Tensor& tensor) { return call.to_host(tensor, is_write); });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.update_arguments();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] =
        map_tensors((*stack)[i], [&](const Tensor& tensor) { return call.to_device(tensor); });
}

// ---- Operators with a kernel here.
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(c10::Device(kCuda)));
  return at::detail::empty_generic(size, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kCuda)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// A copy from pinned memory reads its source, and one to pinned memory writes its target, at any
// time until the host has waited: a source that has changed by then is reported, and the target is
// NaN until then. A copy back to the same memory, or of it, may follow on a stream that waits for
// the first.
void copy_from_pinned(const Call& call, Tensor to, const Tensor& from) {
  Streams::get().finish_copies(call.stream(), /*is_read=*/false);
  to.copy_(from);
  auto snapshot = from.clone();
  Streams::get().deliver_later(call.stream(), call.tick(), [from, snapshot] {
    at::AutoDispatchBelowADInplaceOrView below;
    if (!from.contiguous().view(-1).view(at::kByte).equal(
            snapshot.contiguous().view(-1).view(at::kByte)))
      Streams::get().report("pinned memory has changed before its copy to the device was finished");
  }, /*is_read=*/true);
}
void copy_to_pinned(const Call& call, Tensor to, const Tensor& from) {
  auto result = from.clone();
  Streams::get().finish_copies(call.stream(), /*is_read=*/true);
  if (to.is_non_overlapping_and_dense()) memset(to.data_ptr(), 0xFF, to.nbytes());
  Streams::get().deliver_later(call.stream(), call.tick(), [to, result]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(result);
  });
}
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call("aten::copy_", (self.is_cuda() ? self : from).device().index());
  auto target = call.to_host(self, true), source = call.to_host(from, false);
  const bool is_between = self.is_cuda() != from.is_cuda();
  if (!is_between || self.numel() == 0) {
    target.copy_(source);
    return self;
  }
  const auto& outside = self.is_cuda() ? from : self;
  if (!non_blocking || !is_pinned(outside.data_ptr())) {
    const std::string direction = self.is_cuda() ? " to the device" : " to the host";
    log_synchronisation((non_blocking ? "copy of pageable memory" : "copy") + direction);
    Streams::get().host_waits_for(call.stream());
    target.copy_(source);
  } else if (self.is_cuda()) {
    copy_from_pinned(call, target, source);
  } else {
    copy_to_pinned(call, target, source);
  }
  return self;
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto target = to;
  copy_(target, from, non_blocking);
  return to;
}
Tensor as_strided(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
void record_stream(Tensor& tensor, at::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}
void ignore_record_stream(Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("as_strided", &as_strided);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("record_stream", &record_stream);
  // CUDA has kernels for these; the composite ones would come before the fallback.
  for (auto* name : {"native_layer_norm", "_grouped_mm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, Meta, library) { library.impl("record_stream", &ignore_record_stream); }
// Collectives of the group's CPU backend; they replace torch's kernels, which torch warns about.
struct IgnoreWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
struct HandleWarnings {
  explicit HandleWarnings(c10::WarningHandler* handler) {
    c10::WarningUtils::set_warning_handler(handler);
  }
};
IgnoreWarnings ignore_warnings;
HandleWarnings before_collectives{&ignore_warnings};
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (auto* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_",
        "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_", "gather_",
        "scatter_", "alltoall_", "alltoall_base_", "barrier", "send", "recv_", "recv_any_source_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
HandleWarnings after_collectives{nullptr};

// DDP's logger asks for the times of a CUDA device.
struct HostTimer final : c10d::Timer {
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

struct RegisterAllocator {
  RegisterAllocator() { c10::SetAllocator(kCuda, &device_allocator, 100); }
} register_allocator;

}  // namespace hostcuda

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::hostcuda::HostTimer)
}

extern "C" {
using namespace hostcuda;
void hostcuda_set_listener(Listener call) { listener = call; }
const char* hostcuda_take_violation() {
  static thread_local std::string violation;
  violation = Streams::get().take_violation();
  return violation.empty() ? nullptr : violation.c_str();
}
void hostcuda_set_default_generator(int device, void* generator) {
  default_generators[device] = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(
      static_cast<c10::GeneratorImpl*>(generator)));
}
int hostcuda_has_kernel(const char* name) { return !kWithoutKernel.count(name); }
int64_t hostcuda_live_bytes() { return live_bytes; }
int64_t hostcuda_peak_bytes() { return peak_bytes; }
void hostcuda_reset_peak() { peak_bytes = live_bytes.load(); }
int64_t hostcuda_count_attention(int64_t choice) { return attention_choices[choice]; }
void hostcuda_reset_attention() {
  for (auto& count : attention_choices) count = 0;
}
void hostcuda_resize(void* pointer, int64_t size) {
  auto* storage = static_cast<c10::StorageImpl*>(pointer);
  c10::DeviceGuard guard(storage->device());
  auto memory = device_allocator.allocate(static_cast<size_t>(size));
  if (size && storage->nbytes())
    memcpy(memory.get(), storage->data(), std::min<size_t>(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(static_cast<size_t>(size));
}
}

// "shim": a device of PyTorch's PrivateUse1 key, for tests, on a machine that has none.
//
// Its memory is the host's, at addresses that the host can't read: a block is a mapping whose first half, which the
// address names, forbids every access, and whose second half has the bytes. So a reader of data_ptr() as memory dies
// at once, as on a device. Operations run on CPU tensors of the second halves, one after the other; collectives run on
// gloo. With SHIM_LAZY=1 copies that do not block, from or to pinned memory, are done at a synchronization or when the
// next operation begins, so that a synchronization that is missing shows each time.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/CPUFallback.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Device, at::Tensor;
using c10::DeviceIndex, c10::kPrivateUse1;

constexpr DeviceIndex kDevices = 2;
const bool lazy = std::getenv("SHIM_LAZY") != nullptr && std::string(std::getenv("SHIM_LAZY")) == "1";
thread_local DeviceIndex current = 0;

Device device_of(DeviceIndex index = -1) {
  return {kPrivateUse1, index < 0 ? current : index};
}

/// The state of all devices. Never destroyed: threads and tensors outlive static destructors.
struct Machine {
  std::recursive_mutex mutex;
  std::map<char*, size_t> blocks, pinned;         // address, bytes
  std::vector<std::function<void()>> on_the_way;  // copies, until a synchronization
  std::map<std::string, int64_t> calls;           // of each operation, since the last counts()
};
Machine& machine() {
  static Machine* const all = new Machine;
  return *all;
}
using Lock = std::lock_guard<std::recursive_mutex>;

/// Copies release their tensors after the lock, since that may take the interpreter's.
void finish_copies() {
  std::vector<std::function<void()>> copies;
  const Lock lock(machine().mutex);
  copies.swap(machine().on_the_way);
  for (const auto& copy : copies) copy();
}

void begin(const std::string& operation) {
  finish_copies();
  const Lock lock(machine().mutex);
  ++machine().calls[operation];
}

std::map<char*, size_t>::iterator find(std::map<char*, size_t>& blocks, const void* address) {
  auto* const at = static_cast<char*>(const_cast<void*>(address));
  const auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return blocks.end();
  const auto block = std::prev(after);
  return at <= block->first + block->second ? block : blocks.end();
}

/// The bytes of an address. Found by address, not by the allocator's context: PyTorch also makes tensors of the device
/// from addresses alone.
char* bytes_at(const void* address) {
  if (address == nullptr) return nullptr;
  const Lock lock(machine().mutex);
  const auto block = find(machine().blocks, address);
  TORCH_CHECK(block != machine().blocks.end(), "no address of the shim");
  return static_cast<char*>(const_cast<void*>(address)) + block->second;
}

struct Allocator final : c10::Allocator {
  static void release(void* address) {
    const Lock lock(machine().mutex);
    const auto block = find(machine().blocks, address);
    munmap(block->first, 2 * block->second);
    machine().blocks.erase(block);
  }
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device_of()};
    const size_t half = (bytes + 4095) / 4096 * 4096;
    void* const memory =
        mmap(nullptr, 2 * half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED && mprotect(memory, half, PROT_NONE) == 0, "the shim is out of memory");
    const Lock lock(machine().mutex);
    machine().blocks[static_cast<char*>(memory)] = half;
    return {memory, memory, &release, device_of()};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(bytes_at(to), bytes_at(from), bytes);
  }
} allocator;
REGISTER_ALLOCATOR(kPrivateUse1, &allocator);

struct PinnedAllocator final : at::HostAllocator {
  static void release(void* address) {
    finish_copies();
    {
      const Lock lock(machine().mutex);
      machine().pinned.erase(static_cast<char*>(address));
    }
    std::free(address);
  }
  at::DataPtr allocate(size_t bytes) override {
    auto* const memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    const Lock lock(machine().mutex);
    machine().pinned[memory] = bytes;
    return {memory, memory, &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  at::HostStats get_stats() override { return {}; }
  void empty_cache() override {}
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;
REGISTER_HOST_ALLOCATOR(kPrivateUse1, &pinned_allocator)

/// One stream a device, which has done all but the copies on the way.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kPrivateUse1; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return device_of(); }
  Device exchangeDevice(Device device) const override {
    const Device before = device_of();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_of(device.index()));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override { *event = &allocator; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return (finish_copies(), true); }
  bool queryStream(const c10::Stream&) const override { return (finish_copies(), true); }
  void synchronizeEvent(void*) const override { finish_copies(); }
  void synchronizeStream(const c10::Stream&) const override { finish_copies(); }
  void synchronizeDevice(DeviceIndex) const override { finish_copies(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(device_of(index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(device_of(index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override {
    const Lock lock(machine().mutex);
    return find(machine().pinned, address) != machine().pinned.end();
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    at::DataPtr memory = allocator.allocate(bytes);
    finish_copies();
    if (const size_t kept = std::min(bytes, storage.nbytes()); kept > 0)
      allocator.copy_data(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

/// A CPU tensor of the same bytes. It holds the storage and not the tensor: one of gloo's threads may drop it last, and
/// to release a tensor that Python knows takes the interpreter's lock, which aborts a process that ends.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  char* const bytes = tensor.numel() > 0 ? bytes_at(tensor.const_data_ptr()) : nullptr;
  Tensor host = at::from_blob(
      bytes, tensor.sizes(), tensor.strides(), [storage = tensor.storage()](void*) {},
      at::TensorOptions(tensor.dtype()).device(at::kCPU));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto copy = [source = on_host(from), target = on_host(to)] {
    const at::NoGradGuard guard;
    target.copy_(source);
  };
  const auto is_pinned = [](const Tensor& tensor) { return tensor.is_cpu() && tensor.is_pinned(); };
  if (lazy && non_blocking && (is_pinned(from) || is_pinned(to))) {
    const Lock lock(machine().mutex);
    machine().on_the_way.push_back(copy);
  } else {
    begin("aten::_copy_from");
    copy();
  }
  return to;
}

/// Any operation that has no line below. PyTorch's own fallback would take tensors of two devices; no device does.
void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const std::string name = c10::toString(operation.operator_name());
  for (const c10::IValue& value : torch::jit::last(*stack, operation.schema().arguments().size())) {
    const bool on_cpu = value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu();
    if (!on_cpu || value.toTensor().dim() == 0 || name.find("index") != std::string::npos) continue;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", name, " has one on shim and one on cpu");
  }
  begin(name);
  at::native::cpu_fallback(operation, stack);
}

void run_as_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

/// A tensor, a list of them, or a list of lists.
c10::IValue on_host(const c10::IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_host(tensor));
    return list;
  }
  if (!value.isList() || value.toListRef().empty() || !value.toListRef()[0].isTensorList()) return value;
  c10::List<c10::List<Tensor>> lists;
  for (const c10::IValue& each : value.toListRef()) lists.push_back(on_host(each).toTensorList());
  return lists;
}

/// A collective over the same bytes; what it returns is its first argument.
void run_on_gloo(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  begin(c10::toString(operation.operator_name()));
  const c10::IValue first = stack->at(0);
  for (c10::IValue& value : *stack) value = on_host(value);
  operation.callBoxed(stack);
  if (stack->size() == 2) stack->at(0) = first;
}

using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Place = std::optional<Device>;
constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef sizes, Dtype dtype, Layout, Place place, std::optional<bool>,
             std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_of(place ? place->index() : -1));
  return at::detail::empty_generic(sizes, &allocator, kKey, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, Dtype dtype, Layout, Place place,
                     std::optional<bool>) {
  const c10::DeviceGuard guard(device_of(place ? place->index() : -1));
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kKey, at::dtype_or_default(dtype));
}

template <c10::BoxedKernel::BoxedKernelFunction* kFunction>
void implement(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names) library.impl(name, torch::CppFunction::makeFromBoxedFunction<kFunction>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
// Else copies of such tensors call themselves without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", [](const Tensor& from, const Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
  });
  library.impl("_local_scalar_dense", [](const Tensor& tensor) {
    begin("aten::_local_scalar_dense");
    return on_host(tensor).item();
  });
  // As on CUDA: else module.to("shim") makes other Parameter objects.
  library.impl("_has_compatible_shallow_copy_type",
               [](const Tensor& first, const Tensor& second) { return first.layout() == second.layout(); });
  library.impl("record_stream", [](Tensor&, c10::Stream) {});
  implement<&run_as_cpu>(
      library, {"as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex", "resize_", "set_",
                "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"});
}
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, library) {
  implement<&run_on_gloo>(
      library, {"allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_",
                "allgather_into_tensor_coalesced_", "allgather_coalesced_", "broadcast_", "reduce_", "reduce_scatter_",
                "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_",
                "alltoall_base_", "send", "recv_", "recv_any_source_", "barrier"});
}
TORCH_LIBRARY(shim, library) {
  library.def("counts", [] {
    const Lock lock(machine().mutex);
    std::vector<std::string> lines;
    for (const auto& [name, count] : std::exchange(machine().calls, {}))
      lines.push_back(name + " " + std::to_string(count));
    return lines;
  });
}

}  // namespace

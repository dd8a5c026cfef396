// Which driver and devices answer, or why none does; contexts.
#include "kernels/cuda_driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>

#include "base/errors.h"
#include "base/mutex.h"
#include "kernels/cuda.h"

namespace shardow::kernels::cuda {
namespace {

using base::fail;

constexpr int kLeastVersion = 12000;
constexpr const char* kTooOld = "the NVIDIA driver is too old: update it to 525 or later, which CUDA 12 needs";

std::string message(const Driver& driver, int status) {
  const char *name = nullptr, *text = nullptr;
  static_cast<void>(driver.error_name.status(status, &name));
  static_cast<void>(driver.error_string.status(status, &text));
  if (name == nullptr || text == nullptr) return fmt::format("error {}", status);
  return fmt::format("{} ({})", text, name);
}

void fail_call(const char* function, int status) {
  fail(status == kOutOfDeviceMemory ? Code::kOutOfMemory : Code::kInternal, "CUDA: {}: {}", function,
       message(driver(), status));
}

struct Answer {
  std::unique_ptr<const Driver> driver;
  int version = 0;
  std::string why_not;  ///< empty: a device answers
};

Answer ask() {
  Answer answer;
  try {
    void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) fail(Code::kUnsupported, "this machine has no NVIDIA driver ({})", ::dlerror());
    answer.driver = std::make_unique<const Driver>(Driver{Library{handle, kTooOld, &fail_call}});
    const Driver& driver = *answer.driver;
    if (driver.version.status(&answer.version) != 0 || answer.version < kLeastVersion)
      fail(Code::kUnsupported, "{} (this one is of CUDA {}.{})", kTooOld, answer.version / 1000,
           answer.version % 1000 / 10);
    int count = 0, status = driver.init.status(0);
    if (status == 0) status = driver.device_count.status(&count);
    if (status != 0) fail(Code::kUnsupported, "the NVIDIA driver says: {}", message(driver, status));
    if (count == 0) fail(Code::kUnsupported, "none is installed, or CUDA_VISIBLE_DEVICES hides it");
  } catch (const Error& error) {
    answer.why_not = fmt::format("no CUDA device answers: {}", error.what());
  }
  return answer;
}

const Answer& answer() {
  static const Answer answer = ask();
  return answer;
}

UsedDevice use(int index) {
  const Driver& d = driver();
  int device = 0, major = 0, minor = 0;
  UsedDevice used{};
  char name[256] = "";
  d.device(&device, index);
  d.device_name(name, sizeof(name), device);
  d.device_attribute(&major, kCapabilityMajor, device);
  d.device_attribute(&minor, kCapabilityMinor, device);
  d.device_attribute(&used.multiprocessors, kMultiprocessors, device);
  d.retain_primary_context(&used.context, device);
  used.name = name;
  used.capability = 10 * major + minor;
  return used;
}

}  // namespace

void* Library::find(const char* function) const {
  void* const address = ::dlsym(handle, function);
  if (address == nullptr) base::fail(Code::kUnsupported, "{} (it lacks {})", too_old, function);
  return address;
}

const Driver& driver() {
  if (!available()) throw Error(Code::kUnsupported, why_not());
  return *answer().driver;
}

int driver_version() {
  return answer().version;
}

/// Primary contexts are never given back: memory of the engine may live as long as the process, and is freed at its
/// end.
const UsedDevice& used_device(int index) {
  static auto& mutex = *new base::Mutex;
  static auto& devices = *new std::map<int, UsedDevice>;
  const base::Lock lock(mutex);
  const auto known = devices.find(index);
  return known != devices.end() ? known->second : devices.emplace(index, use(index)).first->second;
}

void DeviceGuard::enter(int index) {
  driver().push_context(used_device(index).context);
  pushed_ = true;
  static_cast<void>(driver().exchange_capture_mode.status(&capture_mode_));
}

DeviceGuard::DeviceGuard(int index, std::nothrow_t) noexcept {
  try {
    enter(index);
  } catch (...) {  // without a driver there is nothing to free
  }
}

DeviceGuard::~DeviceGuard() {
  if (!pushed_) return;
  void* context = nullptr;
  static_cast<void>(driver().exchange_capture_mode.status(&capture_mode_));
  static_cast<void>(driver().pop_context.status(&context));
}

bool available() noexcept {
  return answer().why_not.empty();
}

const char* why_not() noexcept {
  return answer().why_not.c_str();
}

}  // namespace shardow::kernels::cuda

// NVRTC, CUDA's compiler as a library, compiles the kernels where they run, for the device and the driver that are
// there.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/mutex.h"
#include "base/turns.h"
#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"
#include "kernels/cuda_sources.h"  // made by cmake/kernels.cmake

namespace shardow::kernels::cuda {
namespace {

using base::fail;
using Names = std::vector<std::string>;

struct Compiled {
  std::string image;                            ///< a cubin; PTX where NVRTC does not know the device yet
  Names names;                                  ///< of the kernels in the image, in the order asked for
  std::map<int, std::vector<void*>> functions;  ///< that devices have of them, by the devices' indices
};

constexpr int kLeastMajor = 12;
constexpr const char* kTooOld = "this NVRTC is too old: 12.0 or later compiles the kernels";

void fail_call(const char* function, int status);

/// Its functions, with the signatures that they have had since CUDA 11.2.
struct Nvrtc {
  Library library;

  Call<int*, int*> version{library, "nvrtcVersion"};
  Call<int*> num_architectures{library, "nvrtcGetNumSupportedArchs"};
  Call<int*> architectures{library, "nvrtcGetSupportedArchs"};
  Call<void**, const char*, const char*, int, const char* const*, const char* const*> create{library,
                                                                                             "nvrtcCreateProgram"};
  Call<void**> destroy{library, "nvrtcDestroyProgram"};
  Call<void*, const char*> add_name{library, "nvrtcAddNameExpression"};
  Call<void*, int, const char* const*> compile{library, "nvrtcCompileProgram"};
  Call<void*, size_t*> log_size{library, "nvrtcGetProgramLogSize"};
  Call<void*, char*> log{library, "nvrtcGetProgramLog"};
  Call<void*, size_t*> cubin_size{library, "nvrtcGetCUBINSize"};
  Call<void*, char*> cubin{library, "nvrtcGetCUBIN"};
  Call<void*, size_t*> ptx_size{library, "nvrtcGetPTXSize"};
  Call<void*, char*> ptx{library, "nvrtcGetPTX"};
  Call<void*, const char*, const char**> lowered_name{library, "nvrtcGetLoweredName"};

  int major = 0, minor = 0;
  std::string name = {};  ///< "NVRTC 12.9"
};

void fail_call(const char* function, int status) {
  fail(Code::kInternal, "{}: error {}", function, status);
}

/// The end of messages.
std::string device_and_driver(int index) {
  const auto& [context, name, capability, multiprocessors] = used_device(index);
  return fmt::format("device {} is {} of compute capability {}.{}, its driver is of CUDA {}.{}", index, name,
                     capability / 10, capability % 10, driver_version() / 1000, driver_version() % 1000 / 10);
}

/// Opens what SHARDOW_NVRTC names; else what the process has (torch's), what the loader finds, the toolkit's. An NVRTC
/// of a later CUDA than the driver's writes code that the driver refuses, but for those of one major version.
void* open_library(int index) {
  if (const char* const named = std::getenv("SHARDOW_NVRTC"); named != nullptr && *named != '\0') {
    if (void* const handle = ::dlopen(named, RTLD_NOW | RTLD_LOCAL)) return handle;
    fail(Code::kUnsupported, "SHARDOW_NVRTC names no library that can be loaded: {}", ::dlerror());
  }
  for (const auto& [folder, flags] : {std::pair{"", RTLD_NOLOAD}, {"", 0}, {"/usr/local/cuda/lib64/", 0}}) {
    for (int major = driver_version() / 1000; major >= kLeastMajor; --major) {
      const std::string path = fmt::format("{}libnvrtc.so.{}", folder, major);
      if (void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags)) return handle;
    }
  }
  fail(
      Code::kUnsupported,
      "averages on a CUDA device are compiled where they run, and no NVRTC 12.0 or later, CUDA's compiler, was found: "
      "neither libnvrtc.so.{} nor an older one is in the process, on the loader's path or in /usr/local/cuda/lib64. "
      "PyTorch's CUDA wheels bring it; else install nvidia-cuda-nvrtc, or set SHARDOW_NVRTC to the library's path ({})",
      driver_version() / 1000, device_and_driver(index));
}

/// In some wheels NVRTC finds its other half only where that is loaded already.
void load_builtins(void* handle, int major, int minor) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) return;
  const std::string path = map->l_name;
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  static_cast<void>(::dlopen(fmt::format("{}libnvrtc-builtins.so.{}.{}", folder, major, minor).c_str(), RTLD_NOW));
}

Nvrtc open(int index) {
  Nvrtc nvrtc{Library{open_library(index), kTooOld, &fail_call}};
  nvrtc.version(&nvrtc.major, &nvrtc.minor);
  nvrtc.name = fmt::format("NVRTC {}.{}", nvrtc.major, nvrtc.minor);
  if (nvrtc.major < kLeastMajor) fail(Code::kUnsupported, "{} (this one is {}.{})", kTooOld, nvrtc.major, nvrtc.minor);
  if (nvrtc.major > driver_version() / 1000) {
    fail(Code::kUnsupported, "the driver refuses what {} writes: update it, or use an NVRTC of its CUDA ({})",
         nvrtc.name, device_and_driver(index));
  }
  load_builtins(nvrtc.library.handle, nvrtc.major, nvrtc.minor);
  return nvrtc;
}

const Nvrtc& library(int index) {
  static const Nvrtc nvrtc = open(index);
  return nvrtc;
}

auto begin_program(const Nvrtc& nvrtc) {
  std::vector<const char*> texts, names;
  for (const Source& source : kSources) {
    texts.push_back(source.text);
    names.push_back(source.name);
  }
  void* program = nullptr;
  nvrtc.create(&program, kProgram, "shardow.cu", static_cast<int>(texts.size()), texts.data(), names.data());
  const auto end = [&nvrtc](void* ended) { static_cast<void>(nvrtc.destroy.status(&ended)); };
  return std::unique_ptr<void, decltype(end)>(program, end);
}

std::string text_of(void* program, const Call<void*, size_t*>& size, const Call<void*, char*>& get) {
  size_t bytes = 0;
  size(program, &bytes);
  std::string text(bytes, '\0');
  get(program, text.data());
  return text;
}

/// The device's own architecture where NVRTC knows it, else the latest before it, for PTX, from which the driver makes
/// code.
int architecture(const Nvrtc& nvrtc, int index) {
  int count = 0;
  nvrtc.num_architectures(&count);
  std::vector<int> known(static_cast<size_t>(count));
  nvrtc.architectures(known.data());
  const auto later = std::upper_bound(known.begin(), known.end(), used_device(index).capability);
  if (later != known.begin()) return later[-1];
  fail(Code::kUnsupported, "{} no longer compiles for this device: use an older one ({})", nvrtc.name,
       device_and_driver(index));
}

Compiled compile(const Names& kernels, int index) {
  const Nvrtc& nvrtc = library(index);
  const int target = architecture(nvrtc, index);
  const bool known = target == used_device(index).capability;
  const std::string option = fmt::format("--gpu-architecture={}_{}", known ? "sm" : "compute", target);
  // --fmad=false: the device rounds where the host rounds; every fused multiply-add is written out. -default-device:
  // lambdas have no words for where they run.
  const char* const options[] = {"--std=c++20", option.c_str(), "--fmad=false", "-default-device",
                                 "--diag-suppress=161"};  // a pragma of the host's

  const auto program = begin_program(nvrtc);
  for (const std::string& kernel : kernels) nvrtc.add_name(program.get(), kernel.c_str());
  if (nvrtc.compile.status(program.get(), std::size(options), options) != 0) {
    fail(Code::kInternal, "{} refuses the kernels: {} ({})", nvrtc.name,
         text_of(program.get(), nvrtc.log_size, nvrtc.log), device_and_driver(index));
  }
  Compiled compiled;
  compiled.image =
      known ? text_of(program.get(), nvrtc.cubin_size, nvrtc.cubin) : text_of(program.get(), nvrtc.ptx_size, nvrtc.ptx);
  for (const std::string& kernel : kernels) {
    const char* name = nullptr;
    nvrtc.lowered_name(program.get(), kernel.c_str(), &name);
    compiled.names.emplace_back(name);
  }
  return compiled;
}

/// Kernels that the process has compiled, by capability and names.
struct Loaded {
  base::Mutex mutex;
  std::map<std::pair<int, Names>, Compiled> compiled SHARDOW_GUARDED_BY(mutex);
  CompileReport report SHARDOW_GUARDED_BY(mutex);
};

Loaded& loaded() {
  static Loaded* const loaded = new Loaded;
  return *loaded;
}

}  // namespace

const std::vector<void*>& load_kernels(const Names& names, int index) {
  Loaded& all = loaded();
  const UsedDevice& device = used_device(index);
  const base::Lock lock(all.mutex);
  Compiled& compiled = all.compiled[{device.capability, names}];
  if (compiled.image.empty()) {
    const base::Time began = base::now();
    compiled = compile(names, index);
    all.report = {library(index).name, device.name, all.report.seconds + base::seconds_since(began)};
  }
  std::vector<void*>& functions = compiled.functions[index];
  if (functions.empty()) {
    const DeviceGuard guard(index);
    void* module = nullptr;
    guard->load_module(&module, compiled.image.data());
    std::vector<void*> handles(names.size());
    for (size_t i = 0; i < names.size(); ++i) guard->function(&handles[i], module, compiled.names[i].c_str());
    functions = std::move(handles);
  }
  return functions;
}

void check_kernels(int index) {
  static_cast<void>(architecture(library(index), index));
}

CompileReport compile_report() {
  Loaded& all = loaded();
  const base::Lock lock(all.mutex);
  return all.report;
}

}  // namespace shardow::kernels::cuda

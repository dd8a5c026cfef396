#include "kernels/cuda_kernels.h"

#include <chrono>
#include <map>
#include <utility>

#include "base/mutex.h"
#include "base/turns.h"
#include "kernels/cuda.h"
#include "kernels/cuda_driver.h"
#include "kernels/cuda_nvrtc.h"

namespace shardow::kernels::cuda {
namespace {

using Names = std::vector<std::string>;

class Loaded {
 public:
  const std::vector<void*>& functions(const Names& names, int index) {
    const base::Lock lock(mutex_);
    const auto known = functions_.find({index, names});
    if (known != functions_.end()) return known->second;
    const Compiled& compiled = compiled_for(names, index);
    void* module = nullptr;
    driver().load_module(&module, compiled.image.data());
    std::vector<void*> functions(names.size());
    for (size_t i = 0; i < names.size(); ++i) driver().function(&functions[i], module, compiled.names[i].c_str());
    return functions_.emplace(std::pair{index, names}, std::move(functions)).first->second;
  }

  CompileReport report() {
    const base::Lock lock(mutex_);
    return report_;
  }

 private:
  const Compiled& compiled_for(const Names& names, int index) SHARDOW_REQUIRES(mutex_) {
    const std::pair key{used_device(index).capability, names};
    const auto known = compiled_.find(key);
    if (known != compiled_.end()) return known->second;
    const base::Time began = base::now();
    const Compiled& compiled = compiled_.emplace(key, compile(names, index)).first->second;
    report_.compiler = compiled.compiler;
    report_.device = used_device(index).name;
    report_.seconds += std::chrono::duration<double>(base::now() - began).count();
    return compiled;
  }

  base::Mutex mutex_;
  std::map<std::pair<int, Names>, Compiled> compiled_ SHARDOW_GUARDED_BY(mutex_);             // by capability
  std::map<std::pair<int, Names>, std::vector<void*>> functions_ SHARDOW_GUARDED_BY(mutex_);  // by device
  CompileReport report_ SHARDOW_GUARDED_BY(mutex_);
};

Loaded& loaded() {
  static Loaded* const loaded = new Loaded;
  return *loaded;
}

}  // namespace

const std::vector<void*>& load_kernels(const Names& names, int index) {
  return loaded().functions(names, index);
}

CompileReport compile_report() {
  return loaded().report();
}

}  // namespace shardow::kernels::cuda

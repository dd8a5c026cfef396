#include "twins.h"

#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>

#include "emulation.h"
// After the language's words.
#include "kernels/cuda_move.cuh"
#include "kernels/cuda_update.cuh"

namespace shardow::fake {
namespace {

using namespace kernels;
using namespace kernels::cuda;

template <class... Parameters, size_t... kIndex>
std::function<void()> bound(void (*kernel)(Parameters...), void** arguments, std::index_sequence<kIndex...>) {
  const std::tuple<Parameters...> copies(*static_cast<Parameters*>(arguments[kIndex])...);
  return [=] { std::apply(kernel, copies); };
}

template <class... Parameters>
Twin twin(void (*kernel)(Parameters...)) {
  return {{sizeof(Parameters)...},
          [=](void** arguments) { return bound(kernel, arguments, std::index_sequence_for<Parameters...>{}); }};
}

template <class T>
constexpr const char* kName = std::is_same_v<T, float>  ? "float"
                              : std::is_same_v<T, BF16> ? "BF16"
                              : std::is_same_v<T, F16>  ? "F16"
                                                        : "double";

template <class... T>
std::string of_types() {
  std::string names;
  static_cast<void>(((names += (names.empty() ? "<" : ", ") + std::string(kName<T>)), ...));
  return names + ">";
}

/// For driver_test.cc: a block's first thread reads what it has not written.
__global__ void stale_kernel(unsigned* to) {
  __shared__ unsigned value;
  if (threadIdx.x == 0) {
    *to = value;
    value = 7;
  }
}

class Twins {
 public:
  Twins() {
    twins_["stale_kernel"] = twin(&stale_kernel);
    add_averages<float>();
    add_averages<BF16>();
    add_averages<F16>();
    add_averages<double>();
    twins_["swap_kernel"] = twin(&swap_kernel);
  }

  const Twin* find(const std::string& name) const {
    const auto entry = twins_.find(name);
    return entry != twins_.end() ? &entry->second : nullptr;
  }

 private:
  template <class S>
  void add_averages() {
    add_updates<S>(Types<>{}, Types<float, BF16, F16, double>{});
    add_casts<S, float, BF16, F16, double>();
  }

  template <class... T>
  struct Types {};

  /// Adds those of every subset of the parameters' types.
  template <class S, class... P, class Next, class... Rest>
  void add_updates(Types<P...>, Types<Next, Rest...>) {
    add_updates<S>(Types<P...>{}, Types<Rest...>{});
    add_updates<S>(Types<P..., Next>{}, Types<Rest...>{});
  }
  template <class S, class... P>
  void add_updates(Types<P...>, Types<>) {
    if constexpr (sizeof...(P) > 0) {
      twins_["update_kernel" + of_types<S, P...>()] = twin(&update_kernel<S, P...>);
      twins_["copy_kernel" + of_types<S, P...>()] = twin(&copy_kernel<S, P...>);
    }
  }

  template <class From, class... To>
  void add_casts() {
    static_cast<void>(((twins_["cast_kernel" + of_types<From, To>()] = twin(&cast_kernel<From, To>)), ...));
  }

  std::map<std::string, Twin> twins_;
};

}  // namespace

void touch_shared_memory() {
  __shared__ volatile char byte;
  byte = static_cast<char>(byte + 1);
}

std::string plain_name(const std::string& mangled) {
  char* const text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, nullptr);
  std::string name = text != nullptr ? text : mangled;
  std::free(text);
  for (const std::string noise : {"void ", "shardow::kernels::cuda::", "shardow::kernels::"}) {
    for (size_t at = 0; (at = name.find(noise)) != std::string::npos;) name.erase(at, noise.size());
  }
  return name.substr(0, name.find('('));
}

const Twin* twin_of(const std::string& name) {
  static const Twins* const twins = new Twins;
  return twins->find(plain_name(name));
}

}  // namespace shardow::fake

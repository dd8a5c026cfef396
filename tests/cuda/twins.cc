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

template <class... Parameters>
Twin twin(void (*kernel)(Parameters...)) {
  const auto bind = [=](void** arguments) {
    const auto next = [&] { return *arguments++; };
    const std::tuple<Parameters...> copies{*static_cast<Parameters*>(next())...};  // in this order
    return [=] { std::apply(kernel, copies); };
  };
  return {{sizeof(Parameters)...}, bind};
}

using Twins = std::map<std::string, Twin>;

template <auto kKernel>
void add(Twins& twins) {
  const std::string function = __PRETTY_FUNCTION__;  // "... [with auto kKernel = NAME; ..."
  twins[plain_name(function.substr(function.find("kKernel = ") + 10))] = twin(kKernel);
}

template <class... T>
struct Types {};

/// Adds those of every subset of the parameters' types.
template <class S, class... P, class Next, class... Rest>
void add_updates(Twins& twins, Types<P...>, Types<Next, Rest...>) {
  add_updates<S>(twins, Types<P...>{}, Types<Rest...>{});
  add_updates<S>(twins, Types<P..., Next>{}, Types<Rest...>{});
}
template <class S, class... P>
void add_updates(Twins& twins, Types<P...>, Types<>) {
  if constexpr (sizeof...(P) > 0) {
    add<&update_kernel<S, P...>>(twins);
    add<&copy_kernel<S, P...>>(twins);
  }
}

template <class... T>
Twins all_of(Types<T...> types) {
  Twins twins;
  add<&swap_kernel>(twins);
  const auto add_of = [&]<class S>() {
    add_updates<S>(twins, Types<>{}, types);
    (add<&cast_kernel<S, T>>(twins), ...);
  };
  (add_of.template operator()<T>(), ...);
  return twins;
}

}  // namespace

char touch_shared_memory() {
  __shared__ volatile char byte;
  return std::exchange(byte, 7);
}

std::string plain_name(const std::string& mangled) {
  char* const text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, nullptr);
  std::string name = text != nullptr ? text : mangled;
  std::free(text);
  for (const std::string noise : {"void ", "shardow::kernels::cuda::", "shardow::kernels::"}) {
    for (size_t at = 0; (at = name.find(noise)) != std::string::npos;) name.erase(at, noise.size());
  }
  return name.substr(0, name.find_first_of("(;]"));
}

const Twin* twin_of(const std::string& name) {
  static const Twins* const twins = new Twins(all_of(Types<float, BF16, F16, double>{}));
  const auto entry = twins->find(plain_name(name));
  return entry != twins->end() ? &entry->second : nullptr;
}

}  // namespace shardow::fake

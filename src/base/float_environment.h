// The floating-point environment that our numbers are defined in: IEEE 754, to nearest, subnormals kept, nothing trapped.
#pragma once

#include <cfenv>

namespace shardow::base {

/// While it lives, this thread computes in that environment, whatever the caller has set (flush-to-zero is per thread, and threads take it
/// from whoever starts them). Then the caller's is back, its exception flags included. Costs about 0.1 us: once for a call, not an element.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept {
    std::fegetenv(&caller_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&caller_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t caller_;
};

}  // namespace shardow::base

// For the checks of group_checks.h and for tests of groups: what was found wrong, what a call threw,
// deadlines.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "base/turns.h"
#include "group/ranks.h"
#include "group_checks.h"
#include "shardow/error.h"
#include "shardow/group.h"

namespace shardow::group {

/// What a check found wrong, so far: it goes on, since other ranks wait for it.
class Findings {
 public:
  template <typename... Args>
  void expect(bool fine, fmt::format_string<Args...> otherwise, Args&&... args) {
    if (!fine) found_.push_back(fmt::format(otherwise, std::forward<Args>(args)...));
  }
  std::vector<std::string> take() { return std::move(found_); }

 private:
  std::vector<std::string> found_;
};

/// Far enough that only a hang reaches it.
inline Deadline far() {
  return base::now() + std::chrono::minutes(2);
}

/// For the cases in which it is meant to pass.
inline Deadline near() {
  return base::now() + std::chrono::milliseconds(100);
}

struct Caught {
  bool thrown = false;
  Code code = Code::kInternal;
  std::string message;
};

template <typename Fn>
Caught caught(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return {true, error.code(), error.what()};
  }
  return {};
}

/// A check whose body is `body`.
GroupCheck check_of(std::string name, void (*body)(Ranks&, Findings&));

/// An all_gather that works: the group is in step.
void check_in_step(Ranks& group, Findings& found);

/// `call` with a deadline, to which the last rank comes when the others have given up, as it knows by blocks from them.
void check_late(Ranks& group, Findings& found, const std::function<void(Deadline)>& call);

std::vector<GroupCheck> agree_checks();

}  // namespace shardow::group

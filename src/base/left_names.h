// Names that may still change, hours later: a system call that changes them was left, and has not returned.
#pragma once

#include <string>

#include "base/files.h"

namespace shardow::base {

/// A system call that changes what lies at these paths, for as long as it may. Made and destroyed on any thread.
class NameChange {
 public:
  explicit NameChange(std::string first, std::string second = {});
  ~NameChange();
  NameChange(const NameChange&) = delete;
  NameChange& operator=(const NameChange&) = delete;

  void leave() noexcept;  ///< nobody waits for it any more

 private:
  friend bool may_still_change(const Path& path);
  const std::string first_, second_;
  bool left_ = false;
};

/// Whether a call of this process that was left has not returned yet, and may change what lies at `path` when it does.
bool may_still_change(const Path& path);

}  // namespace shardow::base

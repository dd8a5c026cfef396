// All that the simulator takes from inside of the engine. The simulator is frozen (tests/frozen.txt); this file, the
// ranks' Group (stepped_group.h) and its store (late_store.h) follow the engine.
#pragma once

#include "base/files.h"
#include "base/turns.h"
#include "ema/names.h"
#include "file/disk_model.h"

namespace shardow::simulated {

/// What this thread does until the end of the scope meets `disk` in place of the machine's own.
class OnDisk {
 public:
  explicit OnDisk(base::Syscalls* disk) : scope_(disk) {}

 private:
  const base::CallsTo scope_;
};

/// Makes the next run independent of those before it: the engine keeps nothing from save to save.
inline void forget_earlier_runs() {}

}  // namespace shardow::simulated

#include "base/left_names.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/mutex.h"

namespace shardow::base {
namespace {

struct Changes {
  Mutex mutex;
  std::set<const NameChange*> all SHARDOW_GUARDED_BY(mutex);
};

Changes& changes() {
  static Changes& made =
      *new Changes;  // never destroyed: calls that were left may return after what is static has gone
  return made;
}

}  // namespace

NameChange::NameChange(std::string first, std::string second) : first_(std::move(first)), second_(std::move(second)) {
  const Lock lock(changes().mutex);
  changes().all.insert(this);
}

NameChange::~NameChange() {
  const Lock lock(changes().mutex);
  changes().all.erase(this);
}

void NameChange::leave() noexcept {
  const Lock lock(changes().mutex);
  left_ = true;
}

bool may_still_change(const Path& path) {
  const Lock lock(changes().mutex);
  const auto is_of = [&](const NameChange* one) {
    return one->left_ && (one->first_ == path.native() || one->second_ == path.native());
  };
  return std::any_of(changes().all.begin(), changes().all.end(), is_of);
}

}  // namespace shardow::base

// agree() of include/shardow/group.h, for steps whose outcome the others need.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardow/group.h"

namespace shardow::comm {

/// agree(), with what `fn` returned on each rank, by rank.
std::vector<std::string> agree_on(Group& group, Deadline deadline, const std::function<std::string()>& fn);

}  // namespace shardow::comm

// The trajectory of trajectory.h on ranks that are threads.
#include "trajectory.h"

#include <cstdio>
#include <memory>
#include <thread>

#include "shardow/error.h"

int main(int argc, char** argv) {
  if (argc < 7) return 2;
  const shardow::faces::Arguments given = shardow::faces::arguments(argc, argv, 2);
  auto groups = shardow::threads(std::atoi(argv[1]));
  std::vector<int> failed(groups.size());
  std::vector<std::jthread> ranks;
  for (auto& group : groups) {
    ranks.emplace_back([&] {
      try {
        shardow::faces::train(*group, given);
      } catch (const shardow::Error& error) {
        failed[static_cast<size_t>(group->rank())] = 1;
        std::fprintf(stderr, "rank %d: %s\n", group->rank(), error.what());
      }
    });
  }
  ranks.clear();
  for (const int one : failed) {
    if (one != 0) return 1;
  }
  return 0;
}

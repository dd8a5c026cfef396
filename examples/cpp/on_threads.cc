// Ranks that are threads of one process: trainer digits.bin run --ranks 2
#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "trainer.h"

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  std::atomic<bool> failed = false;
  std::vector<std::jthread> ranks;
  for (std::unique_ptr<shardow::Group>& of_rank : shardow::threads(options.ranks)) {
    ranks.emplace_back([&, group = std::move(of_rank)] {
      try {
        train(*group, options);
      } catch (const std::exception& error) {  // of a collective call every rank has one
        std::fprintf(stderr, "rank %d: %s\n", group->rank(), error.what());
        failed = true;
      }
    });
  }
  ranks.clear();
  return failed ? 1 : 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}

// Ranks that are processes, of one machine or several, over the c10d store that torchrun keeps for them:
//
//   torchrun --standalone --nproc-per-node=2 --no-python trainer_processes digits.bin run
#include <shardow/libtorch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "trainer.h"

namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error(std::string(name) + " is not set: start this program with torchrun");
  return value;
}

}  // namespace

int main(int argc, char** argv) try {
  c10d::TCPStoreOptions where;
  where.port = static_cast<uint16_t>(std::stoi(variable("MASTER_PORT")));
  where.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>(variable("MASTER_ADDR"), where);
  const auto group = shardow::libtorch::group(store, std::stoi(variable("RANK")), std::stoi(variable("WORLD_SIZE")));
  train(*group, parse(argc, argv));
} catch (const std::exception& error) {  // of a collective call every rank has one
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

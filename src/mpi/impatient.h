// For tests of ranks that die: mpi() whose ranks wait less long for one that has to give a verdict.
#pragma once

#include <chrono>
#include <memory>

#include "shardow/mpi.h"

#pragma GCC visibility push(default)
namespace shardow::over_mpi {

std::unique_ptr<Group> mpi_with_grace(MPI_Comm comm, std::chrono::milliseconds grace);

}  // namespace shardow::over_mpi
#pragma GCC visibility pop

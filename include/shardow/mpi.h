// The Group of an MPI communicator, in a library of its own, shardow::mpi: docs/cpp.md, "MPI".
#pragma once

#if !__has_include(<mpi.h>)
#error "shardow/mpi.h needs MPI's headers; on Debian and Ubuntu: sudo apt-get install libopenmpi-dev"
#endif
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Collective, without a deadline: duplicates `comm`. For this thread; with MPI_THREAD_MULTIPLE for any, one at a time.
/// Destroy it here, before MPI_Finalize().
std::unique_ptr<Group> mpi(MPI_Comm comm);

}  // namespace shardow
#pragma GCC visibility pop

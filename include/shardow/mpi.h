// The Group of an MPI communicator, in a library of its own: find_package(shardow COMPONENTS mpi), target shardow::mpi.
//
//   int level = 0;
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
//   const std::unique_ptr<shardow::Group> group = shardow::mpi(MPI_COMM_WORLD);
//   shardow::load(*group, ema, "run/ema.safetensors");
//
// What to start mpirun with, and what becomes of a rank that dies: docs/cpp.md, "MPI".
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

#include <memory>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// Duplicates `comm`: collective, without a deadline. The Group is for this thread; with MPI_THREAD_MULTIPLE for any, one at a time.
/// Destroy it here, before MPI_Finalize(). Throws kUnsupported where the library was built without MPI.
std::unique_ptr<Group> mpi(MPI_Comm comm);

}  // namespace shardow
#pragma GCC visibility pop

// The Group of an MPI communicator. In a library of its own: find_package(shardow COMPONENTS mpi), target shardow::mpi.
//
//   int level = 0;
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
//   const std::unique_ptr<shardow::Group> group = shardow::mpi(MPI_COMM_WORLD);
//   shardow::load(*group, ema, "run/ema.safetensors");  // ema_file.h; on any number of ranks
//
// docs/cpp.md says what becomes of a rank that dies, and what to start mpirun with.
#pragma once

#if !__has_include(<mpi.h>)
#error "shardow/mpi.h needs MPI's headers; on Debian and Ubuntu: sudo apt-get install libopenmpi-dev"
#endif
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1  // nothing of MPI's old C++ interface
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <memory>

#include "shardow/group.h"

#pragma GCC visibility push(default)
namespace shardow {

/// The ranks of `comm`. Messages go through a duplicate, made once for each communicator, and meet none of the program's. Collective,
/// without a deadline, as MPI_Comm_dup is. Several Groups of one communicator are independent; all ranks make them in the same order.
///
/// The thread that makes a Group uses it; MPI_THREAD_FUNNELED will do. With MPI_THREAD_MULTIPLE any thread may, one at a time: for a save
/// in the background (StagedSave::write()), which needs a Group of its own. Else calls from another thread throw kInvalidArgument.
///
/// Destroy it on that thread before MPI_Finalize(): the other ranks are told then that this one is gone. For a Group that is left over
/// MPI_Finalize() tells them, and its calls throw kInvalidArgument from there on.
///
/// Throws kInvalidArgument before MPI_Init() or after MPI_Finalize(), for MPI_COMM_NULL and for intercommunicators; kUnsupported where
/// this library was built without MPI.
std::unique_ptr<Group> mpi(MPI_Comm comm);

}  // namespace shardow
#pragma GCC visibility pop

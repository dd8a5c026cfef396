// The Group of an MPI communicator. In a library of its own: find_package(shardow COMPONENTS mpi), target shardow::mpi.
//
//   MPI_Init(&argc, &argv);
//   const std::unique_ptr<shardow::Group> group = shardow::mpi(MPI_COMM_WORLD);
//   shardow::save(*group, ema.views(), "ema.safetensors");
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

/// The ranks of `comm`, which the Group does not use again: its messages go through a duplicate, made once for each communicator, and
/// meet none of the program's. Collective, without a deadline, as MPI_Comm_dup is. Several Groups of one communicator don't know each
/// other; they are made in the same order on all ranks.
///
/// The thread that makes a Group uses it; MPI_THREAD_FUNNELED will do. With MPI_THREAD_MULTIPLE any thread may, one at a time: a save in
/// the background (StagedSave::write()) on a Group of its own, while the program goes on. Calls from another thread throw kInvalidArgument
/// otherwise.
///
/// To be destroyed by that thread before MPI_Finalize(): the other ranks are told then that this one is gone. A Group that is left over
/// lets MPI_Finalize tell them, and its calls throw kInvalidArgument from there on.
///
/// Throws kInvalidArgument before MPI_Init() or after MPI_Finalize(), for MPI_COMM_NULL and for intercommunicators; kUnsupported where
/// this library was built without MPI.
std::unique_ptr<Group> mpi(MPI_Comm comm);

}  // namespace shardow
#pragma GCC visibility pop

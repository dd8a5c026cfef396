// The trajectory of trajectory.h on the ranks of MPI.
#include <cstdio>

#include "shardow/error.h"
#include "shardow/mpi.h"
#include "trajectory.h"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc < 6) return 2;
  try {
    shardow::faces::train(*shardow::mpi(MPI_COMM_WORLD), shardow::faces::arguments(argc, argv, 1));
  } catch (const shardow::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}

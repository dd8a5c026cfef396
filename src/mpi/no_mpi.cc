// The stub twin, of builds without MPI: for programs of either kind of MPI, whose communicators have different types.
#include <memory>

#include "base/errors.h"
#include "shardow/group.h"

struct ompi_communicator_t;  // Open MPI's

#pragma GCC visibility push(default)
namespace shardow {

[[noreturn]] static void refuse() {
  base::fail(Code::kUnsupported, "this build of shardow has no MPI: install libopenmpi-dev, and build it again");
}

std::unique_ptr<Group> mpi(ompi_communicator_t*) {
  refuse();
}

std::unique_ptr<Group> mpi(int) {  // MPICH's
  refuse();
}

}  // namespace shardow
#pragma GCC visibility pop

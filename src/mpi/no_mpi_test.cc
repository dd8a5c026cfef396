// Builds without MPI: the call is there, and says what is missing.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "shardow/error.h"
#include "shardow/group.h"

struct ompi_communicator_t;

namespace shardow {

std::unique_ptr<Group> mpi(ompi_communicator_t* comm);  // as Open MPI's mpi.h and shardow/mpi.h declare it
std::unique_ptr<Group> mpi(int comm);                   // and MPICH's

namespace {

void expect_unsupported(const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("libopenmpi-dev"), std::string::npos) << error.what();
  }
}

TEST(NoMpi, SaysWhatIsMissing) {
  expect_unsupported([] { mpi(nullptr); });
  expect_unsupported([] { mpi(0x44000000); });
}

#ifdef SHARDOW_NO_MPI
TEST(Mpi, AllTests) {
  GTEST_SKIP() << SHARDOW_NO_MPI;
}
#endif

}  // namespace
}  // namespace shardow

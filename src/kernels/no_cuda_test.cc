// Builds without a CUDA toolkit: every call is refused with the way out.
#ifndef SHARDOW_HAVE_CUDA

#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda.h"
#include "shardow/error.h"

namespace shardow::kernels::cuda {
namespace {

template <class Call>
void expect_unsupported(Call&& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("SHARDOW_CUDA"), std::string::npos)
        << "must say how to get a build with CUDA: " << error.what();
  }
}

TEST(NoCuda, EverythingIsRefusedWithTheWayOut) {
  EXPECT_FALSE(built());
  EXPECT_FALSE(available());
  EXPECT_NE(std::string(why_not()), "");
  expect_unsupported([] { static_cast<void>(upload({}, Device{})); });
  expect_unsupported([] { swap(nullptr, DType::kF32, nullptr, DType::kF32, 0, Direction::kIn, Device{}); });
  expect_unsupported([] { cast(nullptr, DType::kF32, nullptr, DType::kF16, 0, Device{}); });
  expect_unsupported([] { static_cast<void>(allocate(16, 0)); });
}

}  // namespace
}  // namespace shardow::kernels::cuda

#endif  // SHARDOW_HAVE_CUDA

// Before each test a device that does what it is asked late, in an order that the test's name seeds. Tests that want
// another one say so.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "fake.h"

namespace {

class Seeded : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override {
    uint64_t seed = 0;
    for (const char* letter = test.name(); *letter != 0; ++letter)
      seed = seed * 31 + static_cast<unsigned char>(*letter);
    shardow::fake::reset({.seed = seed});
  }
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::UnitTest::GetInstance()->listeners().Append(new Seeded);
  return RUN_ALL_TESTS();
}

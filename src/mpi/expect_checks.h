// For tests: checks of include/shardow/conformance.h as expectations.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "comm/findings.h"
#include "shardow/conformance.h"

namespace shardow::over_mpi {

inline void expect_fine(const GroupCheck& check, Group& group) {
  for (const std::string& wrong : check.run(group)) ADD_FAILURE() << check.name << ", rank " << group.rank() << ": " << wrong;
}

inline void expect_check(const std::string& name, Group& group) {
  for (const GroupCheck& check : group_checks()) {
    if (check.name == name) return expect_fine(check, group);
  }
  ADD_FAILURE() << "no check " << name;
}

inline void expect_in_step(Group& group) {
  expect_check("rounds_do_not_mix", group);
}

}  // namespace shardow::over_mpi

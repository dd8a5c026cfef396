// From arguments to an exit status.
#pragma once

namespace shardow::cli {

int run(int argc, char** argv) noexcept;

}  // namespace shardow::cli

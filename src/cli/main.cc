// The program `shardow`: see app.h.
#include "cli/app.h"

int main(int argc, char** argv) {
  return shardow::cli::run(argc, argv);
}

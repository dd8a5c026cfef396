// The trainer, on one of several ranks.
#pragma once

#include <shardow/group.h>

#include <string>

struct Options {
  std::string data, run;  ///< export.py's file; the directory of the checkpoint
  int ranks = 1;          ///< for threads: torchrun is given the number of processes
  int until = 300;
  int die_at = 0;  ///< the step whose save kills rank 0; 0: none
};

/// DATA RUN [--ranks N] [--until STEP] [--die-while-saving STEP]
Options parse(int argc, char** argv);

/// Collective: trains up to a step, saves on the way, and prints on rank 0 what weights and averages are worth.
void train(shardow::Group& group, const Options& options);

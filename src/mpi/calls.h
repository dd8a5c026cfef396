// MPI's calls, and what an error of theirs becomes.
#pragma once

#include "base/errors.h"
#include "shardow/mpi.h"

namespace shardow::over_mpi {

/// Throws kPeerFailed where `result` is an error: MPI's own words for `call`.
inline void check(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  base::fail(Code::kPeerFailed, "{}: {}", call, std::string_view(text, static_cast<size_t>(length)));
}

/// Whether MPI's calls may be made: it was initialised, and is not finalised.
inline bool is_on() {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

}  // namespace shardow::over_mpi

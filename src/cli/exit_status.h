// What the program ends with.
#pragma once

#include <string>

#include "shardow/error.h"

namespace shardow::cli {

inline constexpr int kDifferent = 1;  ///< a check that failed: verify found something wrong, diff a difference

/// "  0  done, ..." a line for each status, for the help: the one place where they are explained. The numbers are
/// base::exit_code()'s.
std::string exit_status_table();

/// `path` is in its place: an error after that, of standard output for one, says so.
void note_written(const std::string& path);

/// The program's status for the exception that is being handled, after it has been reported: as text to standard error,
/// and with `json` as
/// {"error": {...}} to standard output. Dies of the signal where that was the reason.
int report_exception(bool json) noexcept;

}  // namespace shardow::cli

// Standard output and standard error as good tools treat them: nothing is lost in silence, nothing but text goes into a
// pipe, and Ctrl-C ends the work as if it had never begun.
//
// For the main thread, but for check_interrupted().
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "cli/text.h"

namespace shardow::cli {

/// Thrown where a signal asks the program to end, so that drafts of files are removed on the way out; main() then dies
/// of the signal.
struct Interrupted {
  int signal;
};

/// Thrown where nobody reads standard output any more; main() then dies of SIGPIPE, as if it were not ignored.
struct ClosedPipe {};

/// Opens /dev/null in place of a standard stream that is closed, or a file that is written would get its number, and
/// our text. Has SIGINT, SIGTERM and SIGHUP asked for by check_interrupted(), the second time they kill. What the
/// parent ignores stays ignored.
void prepare_process();

/// Throws Interrupted. Any thread.
void check_interrupted();

/// Dies of `signal`, as the shell expects of who was interrupted.
[[noreturn]] void die_of(int signal);

/// All of `text`, unless a signal asks the program to end: throws Interrupted. Returns 0, or errno.
int write_all(int fd, std::string_view text);

/// Text to standard output, kept until there is a good piece of it.
void put(std::string_view text);
template <typename... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  put(fmt::format(format, std::forward<Args>(args)...));
}

void put_json(const Json& document);  ///< a line

/// All of it. Throws ClosedPipe, or kIo and kOutOfSpace: a full disk behind standard output is an error too.
void flush_output();

/// "shardow: text" to standard error.
void complain(std::string_view text);

enum class Colour { kBad = 31, kGood = 32, kDim = 2, kBold = 1 };

/// In colours only where standard output is a terminal, TERM is not "dumb", and NO_COLOR is not set (no-color.org).
std::string coloured(Colour colour, std::string_view text);

/// One line on standard error, where that is a terminal; gone when it ends. tell() is cheap.
class ProgressLine {
 public:
  explicit ProgressLine(std::string what, bool wanted = true);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void tell(int64_t done, int64_t total);  ///< bytes

 private:
  std::string what_;
  bool shows_;
  double last_ = -1, begin_;  // seconds
};

}  // namespace shardow::cli

// Two tables over the closed set. No default label: the compiler names the code that a change forgot.
#include "base/errors.h"

namespace shardow {
namespace {

std::string without_nul(const std::string& message) {
  std::string shown;
  for (const char c : message) c == '\0' ? shown.append("\\x00") : shown.append(1, c);
  return shown;
}

}  // namespace

Error::Error(Code code, const std::string& message, int os_errno)
    : std::runtime_error(without_nul(message)), code_(code), os_errno_(os_errno) {}

}  // namespace shardow

namespace shardow::base {

const char* code_name(Code code) noexcept {
  switch (code) {
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kNotFound: return "not_found";
    case Code::kCorrupt: return "corrupt";
    case Code::kUnsupported: return "unsupported";
    case Code::kIo: return "io";
    case Code::kOutOfSpace: return "out_of_space";
    case Code::kOutOfMemory: return "out_of_memory";
    case Code::kTimeout: return "timeout";
    case Code::kPeerFailed: return "peer_failed";
    case Code::kInternal: return "internal";
  }
  return "internal";
}

int exit_code(Code code) noexcept {
  switch (code) {
    case Code::kInvalidArgument: return 2;
    case Code::kNotFound: return 3;
    case Code::kCorrupt: return 4;
    case Code::kUnsupported: return 5;
    case Code::kIo: return 6;
    case Code::kOutOfSpace: return 7;
    case Code::kTimeout: return 8;
    case Code::kPeerFailed: return 9;
    case Code::kInternal: return 10;
    case Code::kOutOfMemory: return 11;
  }
  return 10;
}

}  // namespace shardow::base

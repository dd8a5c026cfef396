// One table over the closed set. No default label: the compiler names the code that a change forgot.
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

CodeRow row_of(Code code) noexcept {
  switch (code) {
    case Code::kInvalidArgument: return {"invalid_argument", 2, "the call is wrong, or does not fit the files"};
    case Code::kNotFound: return {"not_found", 3, "no such file or tensor"};
    case Code::kCorrupt: return {"corrupt", 4, "a file contradicts its format or its checksums"};
    case Code::kUnsupported: return {"unsupported", 5, "valid, but not possible here"};
    case Code::kIo: return {"io", 6, "the operating system refused to read or write"};
    case Code::kOutOfSpace: return {"out_of_space", 7, "the disk or a quota is full"};
    case Code::kOutOfMemory: return {"out_of_memory", 11, "out of memory"};
    case Code::kTimeout: return {"timeout", 8, "a deadline passed"};
    case Code::kPeerFailed: return {"peer_failed", 9, "another process failed"};
    case Code::kInternal: break;
  }
  return {"internal", 10, "a bug in shardow"};
}

}  // namespace shardow::base

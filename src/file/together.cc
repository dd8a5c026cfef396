#include "file/together.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/files.h"
#include "file/wire.h"
#include "shardow/error.h"

namespace shardow::file {
namespace {

/// A rank's message about how a step went there.
std::string success(const Part& part) {
  Sender out;
  out.number(-1);
  out.number(part.bytes);
  out.number(part.last ? 1 : 0);
  return out.bytes();
}

std::string failure(Code code, const std::string& message, int error) {
  Sender out;
  out.number(static_cast<int64_t>(code));
  out.text(message);
  out.number(error);
  return out.bytes();
}

std::string failure_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return failure(error.code(), error.what(), error.os_errno());
  } catch (const std::exception& error) {
    return failure(Code::kInternal, error.what(), 0);
  } catch (...) {
    return failure(Code::kInternal, "an exception that is no std::exception", 0);
  }
}

/// Every rank's part; throws the first failure.
std::vector<Part> parts_of(const std::vector<std::string>& messages) {
  std::vector<Part> parts;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    Receiver in(messages[rank]);
    const int64_t code = in.number();
    if (code >= 0) {
      const std::string message = in.text();
      throw Error(static_cast<Code>(code), "rank " + std::to_string(rank) + ": " + message, static_cast<int>(in.number()));
    }
    const int64_t bytes = in.number();
    parts.push_back({bytes, in.number() != 0});
  }
  return parts;
}

/// What a rank that waits for a dead or late one gets, which differs from rank to rank.
bool is_about_others(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error.code() == Code::kTimeout || error.code() == Code::kPeerFailed;
  } catch (...) {
    return false;
  }
}

/// The timeout counts from the beginning, so that a rank whose `fn` waited in vain for another does not wait twice.
std::vector<Part> step(Group& group, std::chrono::milliseconds timeout, const std::function<Part()>& fn) {
  constexpr std::chrono::milliseconds kAtLeast{1000};
  const auto begin = std::chrono::steady_clock::now();
  std::string mine;
  std::exception_ptr thrown;
  try {
    mine = success(base::in_our_words(fn));
  } catch (...) {
    thrown = std::current_exception();
    mine = failure_of(thrown);
  }
  try {
    const Deadline deadline = std::max(begin + timeout, std::chrono::steady_clock::now() + std::min(timeout, kAtLeast));
    return parts_of(group.all_gather(mine, deadline));
  } catch (...) {
    if (thrown && !is_about_others(thrown)) std::rethrow_exception(thrown);
    throw;
  }
}

}  // namespace

void together(Group& group, std::chrono::milliseconds timeout, const std::function<void()>& fn) {
  step(group, timeout, [&] {
    fn();
    return Part{0, true};
  });
}

void Parts::run(const std::function<Part()>& part) {
  bool here_done = false;
  for (bool all_done = false; !all_done;) {
    const std::vector<Part> parts = step(group_, timeout_, [&] {
      const Part found = here_done ? Part{0, true} : part();  // first: in an exchange others wait for it
      here_done = found.last;
      tell();
      return found;
    });
    all_done = true;
    for (const Part& one : parts) {
      done_ += one.bytes;
      all_done = all_done && one.last;
    }
  }
}

void Parts::tell() {
  if (!progress_ || group_.rank() != 0 || told_ == done_) return;
  told_ = done_;
  progress_(done_, total_);
}

}  // namespace shardow::file

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
std::string success(std::string_view words) {
  Sender out;
  out.number(-1);
  out.text(words);
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

/// Every rank's words; throws the first failure.
std::vector<std::string> words_of(const std::vector<std::string>& messages) {
  std::vector<std::string> words;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    Receiver in(messages[rank]);
    const int64_t code = in.number();
    std::string text = in.text();
    if (code >= 0) throw Error(static_cast<Code>(code), "rank " + std::to_string(rank) + ": " + text, static_cast<int>(in.number()));
    words.push_back(std::move(text));
  }
  return words;
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

std::string packed(const Part& part) {
  Sender out;
  out.number(part.bytes);
  out.number(part.last ? 1 : 0);
  out.text(part.words);
  return out.bytes();
}

Part unpacked(std::string_view bytes) {
  Receiver in(bytes);
  const int64_t done = in.number();
  const bool last = in.number() != 0;
  return {done, last, in.text()};
}

}  // namespace

/// The timeout counts from the beginning, so that a rank whose `fn` waited in vain for another does not wait twice.
std::vector<std::string> gather_together(Group& group, std::chrono::milliseconds timeout, const std::function<std::string()>& fn) {
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
    return words_of(group.all_gather(mine, deadline));
  } catch (...) {
    if (thrown && !is_about_others(thrown)) std::rethrow_exception(thrown);
    throw;
  }
}

void together(Group& group, std::chrono::milliseconds timeout, const std::function<void()>& fn) {
  gather_together(group, timeout, [&] {
    fn();
    return std::string();
  });
}

std::vector<std::string> Parts::run(const std::function<Part()>& part) {
  std::vector<std::string> words(static_cast<size_t>(group_.size()));
  bool here_done = false;
  for (bool all_done = false; !all_done;) {
    const std::vector<std::string> parts = gather_together(group_, timeout_, [&] {
      const Part found = here_done ? Part{0, true} : part();  // first: in an exchange others wait for it
      here_done = found.last;
      tell();
      return packed(found);
    });
    all_done = true;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      Part one = unpacked(parts[rank]);
      done_ += one.bytes;
      all_done = all_done && one.last;
      if (!one.words.empty()) words[rank] = std::move(one.words);
    }
  }
  return words;
}

void Parts::tell() {
  if (!progress_ || group_.rank() != 0 || told_ == done_) return;
  told_ = done_;
  progress_(done_, total_);
}

}  // namespace shardow::file

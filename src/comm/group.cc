// agree() is one all_gather of statuses: empty for success, else a mark and the message. The verdict needs no second round, because a round
// of a Group succeeds or fails for all of its ranks.
#include "shardow/group.h"

#include <exception>
#include <utility>

#include "base/errors.h"

namespace shardow {
namespace {

constexpr char kFailed = '!';
constexpr size_t kLongestMessage = 4096;  // a status is a fact, and travels to every rank

/// Cut between characters of UTF-8.
std::string shortened(std::string message) {
  if (message.size() <= kLongestMessage) return message;
  size_t end = kLongestMessage;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0) == 0x80) --end;
  message.resize(end);
  return message + "...";
}

struct Outcome {
  std::exception_ptr thrown;
  std::string status;
};

Outcome outcome_of(const std::function<void()>& fn) {
  try {
    fn();
    return {};
  } catch (const Error& error) {
    return {std::current_exception(), kFailed + shortened(fmt::format("{} ({})", error.what(), base::code_name(error.code())))};
  } catch (const std::exception& error) {
    return {std::current_exception(), kFailed + shortened(error.what())};
  } catch (...) {
    return {std::current_exception(), kFailed + std::string("an exception that is no std::exception")};
  }
}

[[noreturn]] void fail_for_others(const std::vector<std::string>& statuses) {
  std::vector<size_t> failed;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    if (!statuses[rank].empty()) failed.push_back(rank);
  }
  const std::string_view first = std::string_view(statuses[failed.front()]).substr(1);
  if (failed.size() == 1) base::fail(Code::kPeerFailed, "rank {} of {} failed: {}", failed.front(), statuses.size(), first);
  base::fail(Code::kPeerFailed, "ranks {} of {} failed; rank {}: {}", fmt::join(failed, ", "), statuses.size(), failed.front(), first);
}

}  // namespace

void agree(Group& group, Deadline deadline, const std::function<void()>& fn) {
  const Outcome mine = outcome_of(fn);
  std::vector<std::string> statuses;
  try {
    statuses = group.all_gather(mine.status, deadline);
  } catch (...) {
    if (mine.thrown) std::rethrow_exception(mine.thrown);  // says more than that nobody could be told
    throw;
  }
  if (mine.thrown) std::rethrow_exception(mine.thrown);
  for (const std::string& status : statuses) {
    if (!status.empty()) fail_for_others(statuses);
  }
}

}  // namespace shardow

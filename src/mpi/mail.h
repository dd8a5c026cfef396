// Mail: what a Star needs of a network. Messages of one rank to another arrive in the order in which they were sent, or
// not at all.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace shardow::over_mpi {

struct Letter {
  int from;
  std::string bytes;  ///< empty: that rank is gone, and sends nothing any more
};

/// One rank's; for one thread.
class Mail {
 public:
  virtual ~Mail() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// Returns at once; `bytes` live until they are on their way.
  virtual void send(int to, std::shared_ptr<const std::string> bytes) = 0;

  /// The next message that has come, from anybody.
  virtual std::optional<Letter> receive() = 0;

  /// Whether all that was sent gets where it goes without this rank doing anything more.
  virtual bool all_sent() = 0;

  /// all_sent() is not about what was sent until now. It stays under way.
  virtual void leave_unsent() = 0;
};

}  // namespace shardow::over_mpi

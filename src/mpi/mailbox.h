// Mailbox: Mail over MPI. Nothing is ever asked of MPI that waits: messages are sent with MPI_Isend and looked for with
// MPI_Improbe, and no receive is posted before its message is there, so that none is left over.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mpi/calls.h"
#include "mpi/mail.h"

namespace shardow::over_mpi {

/// A communicator's duplicate, which the Groups of that communicator share, each with a tag of its own.
struct Duplicate {
  /// Of a Group that is no more here: what still comes for it is thrown away, until the last rank says goodbye.
  struct LeftTag {
    int tag, goodbyes_to_come;
  };

  MPI_Comm comm = MPI_COMM_NULL;
  int num_groups = 0;  ///< that were made, here as on every rank
  std::vector<LeftTag> left_tags;
};

/// That of `comm`, made where it has none. Collective then.
std::shared_ptr<Duplicate> duplicate_of(MPI_Comm comm);

/// A message that MPI may still read or write. Its memory lives until MPI has done with it, whatever becomes of the
/// Mailbox.
struct UnderWay {
  MPI_Request request = MPI_REQUEST_NULL;
  int peer;
  std::shared_ptr<const std::string> sent;  ///< or
  std::string received;
  bool counts = true;  ///< for all_sent()
};

class Mailbox final : public Mail {
 public:
  /// The next Group of the communicator; on every rank in the same order.
  explicit Mailbox(std::shared_ptr<Duplicate> duplicate);
  ~Mailbox() override;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void send(int to, std::shared_ptr<const std::string> bytes) override;
  std::optional<Letter> receive() override;
  bool all_sent() override;
  void leave_unsent() override;

  /// The other ranks are told that this one is gone; it sends nothing afterwards. Once; not after MPI_Finalize().
  void say_goodbye();

 private:
  const std::shared_ptr<Duplicate> duplicate_;
  const int tag_;
  int rank_ = 0, size_ = 0;
  bool said_goodbye_ = false;
  int goodbyes_to_come_ = 0;
  std::list<UnderWay> sending_;
  std::list<UnderWay> receiving_;  // in the order in which they were sent, of each rank
  std::vector<int> lost_;          // ranks that MPI could not reach
};

}  // namespace shardow::over_mpi

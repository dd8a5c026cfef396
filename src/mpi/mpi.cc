// A Star over a Mailbox, with what MPI asks of threads checked at every call: MPI itself would not say.
#include "shardow/mpi.h"

#include <atomic>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "mpi/calls.h"
#include "mpi/impatient.h"
#include "mpi/mailbox.h"
#include "mpi/star.h"
#include "shardow/custom_group.h"

namespace shardow {
namespace {

const char* level_name(int level) {
  return level == MPI_THREAD_SINGLE     ? "MPI_THREAD_SINGLE"
         : level == MPI_THREAD_FUNNELED ? "MPI_THREAD_FUNNELED"
                                        : "MPI_THREAD_SERIALIZED";
}

constexpr size_t kMostBytes = size_t{1} << 30;  // MPI counts with int

class MpiMeeting final : public Meeting {
 public:
  MpiMeeting(std::unique_ptr<over_mpi::Mail> mail, std::chrono::milliseconds grace) : star_(std::move(mail), grace) {}

  int rank() const noexcept override { return star_.rank(); }
  int size() const noexcept override { return star_.size(); }

  std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) override {
    if (!over_mpi::is_on())
      base::fail(Code::kInvalidArgument, "{}: MPI_Finalize() was called; nothing is shared by ranks after it",
                 offer.call);
    check_thread(offer.call);
    if (offer.bytes.size() > kMostBytes)
      base::fail(Code::kInvalidArgument, "{}: {} bytes; a Group moves facts and blocks, of {} bytes at most",
                 offer.call, offer.bytes.size(), kMostBytes);
    if (in_use_.exchange(true))
      base::fail(Code::kInvalidArgument, "{}: another thread is in a call of this Group", offer.call);
    struct Free {
      std::atomic<bool>& flag;
      ~Free() { flag = false; }
    } const free{in_use_};
    return star_.meet(lane, std::move(offer), deadline);
  }

 private:
  void check_thread(const std::string& call) const {
    int level = 0;
    if (std::this_thread::get_id() == owner_ || (MPI_Query_thread(&level), level == MPI_THREAD_MULTIPLE)) return;
    base::fail(Code::kInvalidArgument,
               "{}: this is not the thread that made the Group. A save in the background, or any call from another "
               "thread, needs "
               "MPI_Init_thread() with MPI_THREAD_MULTIPLE; this program has {}",
               call, level_name(level));
  }

  over_mpi::Star star_;
  const std::thread::id owner_ = std::this_thread::get_id();
  std::atomic<bool> in_use_ = false;
};

void check_comm(MPI_Comm comm) {
  if (!over_mpi::is_on())
    base::fail(Code::kInvalidArgument, "mpi(): to be called after MPI_Init() and before MPI_Finalize()");
  int level = 0, main = 0;
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&main);
  if (level < MPI_THREAD_SERIALIZED && main == 0)
    base::fail(Code::kInvalidArgument, "mpi(): with {}, only the thread that called MPI_Init() may use MPI",
               level_name(level));
  if (comm == MPI_COMM_NULL) base::fail(Code::kInvalidArgument, "mpi(): MPI_COMM_NULL has no ranks");
  int between = 0;
  over_mpi::check(MPI_Comm_test_inter(comm, &between), "MPI_Comm_test_inter()");
  if (between != 0)
    base::fail(Code::kInvalidArgument, "mpi(): an intercommunicator; MPI_Intercomm_merge() makes one group of its two");
}

}  // namespace

std::unique_ptr<Group> over_mpi::mpi_with_grace(MPI_Comm comm, std::chrono::milliseconds grace) {
  check_comm(comm);
  return meeting_group(std::make_unique<MpiMeeting>(std::make_unique<Mailbox>(duplicate_of(comm)), grace));
}

std::unique_ptr<Group> mpi(MPI_Comm comm) {
  return over_mpi::mpi_with_grace(comm, over_mpi::kGrace);
}

}  // namespace shardow

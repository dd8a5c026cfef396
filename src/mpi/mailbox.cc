// A message is an MPI message of the Group's tag on the duplicate; one without bytes says that its sender is gone. What
// is under way when a Mailbox ends (a message to a rank that never came) is left to the process, which looks after it
// whenever a Mailbox is made or ends.
#include "mpi/mailbox.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/mutex.h"

namespace shardow::over_mpi {
namespace {

/// What outlives its Mailbox, and who must say goodbye at MPI_Finalize(). Never destroyed: MPI may write into it till
/// the end.
struct Process {
  base::Mutex mutex;
  std::list<UnderWay> left SHARDOW_GUARDED_BY(mutex);
  std::vector<Mailbox*> open SHARDOW_GUARDED_BY(mutex);
  int duplicates = MPI_KEYVAL_INVALID;  // the attribute of a communicator that is its Duplicate
  int farewell = MPI_KEYVAL_INVALID;    // the attribute of MPI_COMM_SELF that MPI_Finalize() takes away first
};

Process& process() {
  static auto* const one = new Process;
  return *one;
}

bool done(UnderWay& one) {
  int flag = 0;
  return MPI_Test(&one.request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag != 0;
}

int at_finalize(MPI_Comm, int, void*, void*) {
  std::vector<Mailbox*> open;
  {
    const base::Lock lock(process().mutex);
    open = process().open;
  }
  for (Mailbox* mailbox : open) mailbox->say_goodbye();
  return MPI_SUCCESS;
}

int largest_tag(MPI_Comm comm) {
  void* value = nullptr;
  int found = 0;
  MPI_Comm_get_attr(comm, MPI_TAG_UB, &value, &found);
  return found != 0 ? *static_cast<int*>(value) : 32767;
}

/// Begins to receive the next message of the tag, from anybody, where one has come. Its memory has its place before MPI
/// knows of it.
bool receive_next(MPI_Comm comm, int tag, std::list<UnderWay>& into) {
  int flag = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  check(MPI_Improbe(MPI_ANY_SOURCE, tag, comm, &flag, &message, &status), "MPI_Improbe()");
  if (flag == 0) return false;
  int count = 0;
  MPI_Get_count(&status, MPI_BYTE, &count);
  UnderWay& one = into.emplace_back();
  one.peer = status.MPI_SOURCE;
  one.received.resize(static_cast<size_t>(count));
  check(MPI_Imrecv(one.received.data(), count, MPI_BYTE, &message, &one.request), "MPI_Imrecv()");
  return true;
}

/// Throws away what came for Groups that are no more.
void clear_left_tags(Duplicate& duplicate) {
  Process& process = over_mpi::process();
  const base::Lock lock(process.mutex);
  std::erase_if(duplicate.left_tags, [&](Duplicate::LeftTag& left) SHARDOW_REQUIRES(process.mutex) {
    while (receive_next(duplicate.comm, left.tag, process.left))
      left.goodbyes_to_come -= process.left.back().received.empty() ? 1 : 0;
    return left.goodbyes_to_come <= 0;
  });
  process.left.remove_if(done);
}

/// A communicator is freed. So is its duplicate when every rank has said goodbye: MPI gives its number to the next
/// communicator, and would take what still comes for that one's. Where a rank is silent, or Groups are left, the
/// duplicate stays until MPI_Finalize().
int at_free(MPI_Comm, int, void* attribute, void*) {
  const std::unique_ptr<std::shared_ptr<Duplicate>> held(static_cast<std::shared_ptr<Duplicate>*>(attribute));
  if (held->use_count() > 1 || !is_on()) return MPI_SUCCESS;
  Duplicate& duplicate = **held;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  try {
    do {
      clear_left_tags(duplicate);
      sched_yield();
    } while (!duplicate.left_tags.empty() && std::chrono::steady_clock::now() < until);
    if (duplicate.left_tags.empty()) MPI_Comm_free(&duplicate.comm);
  } catch (const Error&) {
  }
  return MPI_SUCCESS;
}

void make_keys() {
  Process& process = over_mpi::process();
  if (process.duplicates != MPI_KEYVAL_INVALID) return;
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_free, &process.duplicates, nullptr),
        "MPI_Comm_create_keyval()");
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_finalize, &process.farewell, nullptr),
        "MPI_Comm_create_keyval()");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, process.farewell, nullptr), "MPI_Comm_set_attr()");
}

}  // namespace

std::shared_ptr<Duplicate> duplicate_of(MPI_Comm comm) {
  make_keys();
  void* attribute = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(comm, process().duplicates, &attribute, &found), "MPI_Comm_get_attr()");
  if (found != 0) return *static_cast<std::shared_ptr<Duplicate>*>(attribute);
  auto held = std::make_unique<std::shared_ptr<Duplicate>>(std::make_shared<Duplicate>());
  MPI_Comm& ours = (*held)->comm;
  check(MPI_Comm_dup(comm, &ours), "MPI_Comm_dup()");
  check(MPI_Comm_set_errhandler(ours, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler()");
  check(MPI_Comm_set_attr(comm, process().duplicates, held.get()), "MPI_Comm_set_attr()");
  return *held.release();
}

Mailbox::Mailbox(std::shared_ptr<Duplicate> duplicate)
    : duplicate_(std::move(duplicate)), tag_(duplicate_->num_groups++ & largest_tag(duplicate_->comm)) {
  MPI_Comm_rank(duplicate_->comm, &rank_);
  MPI_Comm_size(duplicate_->comm, &size_);
  goodbyes_to_come_ = size_ - 1;
  clear_left_tags(*duplicate_);
  const base::Lock lock(process().mutex);
  process().open.push_back(this);
}

Mailbox::~Mailbox() {
  if (is_on()) {
    say_goodbye();
    duplicate_->left_tags.push_back({tag_, goodbyes_to_come_});
    try {
      clear_left_tags(*duplicate_);
    } catch (const Error&) {  // of MPI, about a rank that is no more
    }
  }
  const base::Lock lock(process().mutex);
  std::erase(process().open, this);
  for (std::list<UnderWay>* messages : {&sending_, &receiving_}) process().left.splice(process().left.end(), *messages);
}

// NOLINTBEGIN(clang-analyzer-optin.mpi.MPI-Checker): it looks for a wait in the same function
void Mailbox::send(int to, std::shared_ptr<const std::string> bytes) {
  UnderWay& one = sending_.emplace_back();
  one.peer = to;
  one.sent = std::move(bytes);
  if (MPI_Isend(one.sent->data(), static_cast<int>(one.sent->size()), MPI_BYTE, to, tag_, duplicate_->comm,
                &one.request) == MPI_SUCCESS)
    return;
  lost_.push_back(to);
  sending_.pop_back();
}
// NOLINTEND(clang-analyzer-optin.mpi.MPI-Checker)

std::optional<Letter> Mailbox::receive() {
  all_sent();
  while (receive_next(duplicate_->comm, tag_, receiving_)) {
  }
  if (!lost_.empty()) {
    const int rank = lost_.back();
    lost_.pop_back();
    return Letter{rank, {}};
  }
  for (auto one = receiving_.begin(); one != receiving_.end(); ++one) {
    const bool is_next =
        std::none_of(receiving_.begin(), one, [&](const UnderWay& before) { return before.peer == one->peer; });
    if (!is_next || !done(*one)) continue;
    Letter letter{one->peer, std::move(one->received)};
    receiving_.erase(one);
    if (letter.bytes.empty()) --goodbyes_to_come_;
    return letter;
  }
  return std::nullopt;
}

bool Mailbox::all_sent() {
  bool all = true;
  for (auto one = sending_.begin(); one != sending_.end();) {
    int flag = 0;
    if (MPI_Test(&one->request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
      lost_.push_back(one->peer);
      flag = 1;
    }
    all = all && (flag != 0 || !one->counts);
    one = flag != 0 ? sending_.erase(one) : std::next(one);
  }
  return all;
}

void Mailbox::leave_unsent() {
  for (UnderWay& one : sending_) one.counts = false;
}

void Mailbox::say_goodbye() {
  if (std::exchange(said_goodbye_, true)) return;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) send(rank, std::make_shared<const std::string>());
  }
  leave_unsent();
}

}  // namespace shardow::over_mpi

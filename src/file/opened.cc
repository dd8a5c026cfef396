#include "file/opened.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/errors.h"
#include "base/mutex.h"

namespace shardow::file {

/// All handles of the process, the one that was used last in front.
class Handles {
 public:
  static Handles& all() {
    static Handles& handles = *new Handles;  // never destroyed: checkpoints may outlive what is static
    return handles;
  }

  std::shared_ptr<const base::File> use(Opened& one) {
    const base::Lock lock(mutex_);
    if (one.file_) open_.splice(open_.begin(), open_, one.place_);
    return one.file_;
  }

  /// Another thread may have been first.
  std::shared_ptr<const base::File> keep(Opened& one, base::File file) {
    const base::Lock lock(mutex_);
    if (one.file_) return one.file_;
    one.file_ = std::make_shared<const base::File>(std::move(file));
    one.place_ = open_.insert(open_.begin(), &one);
    std::shared_ptr<const base::File> kept = one.file_;
    close_idle(most_);
    return kept;
  }

  void forget(Opened& one) {
    const base::Lock lock(mutex_);
    if (one.file_) open_.erase(one.place_);
    one.file_.reset();
  }

 private:
  Handles() { base::set_room_maker(make_room); }

  static void make_room() {
    Handles& handles = all();
    const base::Lock lock(handles.mutex_);
    handles.close_idle(0);
  }

  static size_t limit() {
    rlimit files{};
    const bool known = ::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur != RLIM_INFINITY;
    return known ? std::clamp<size_t>(files.rlim_cur / 4, 8, 512) : 512;
  }

  /// Until there are `most`, as far as they are not in use.
  void close_idle(size_t most) SHARDOW_REQUIRES(mutex_) {
    for (auto at = open_.end(); at != open_.begin() && open_.size() > most;) {
      --at;
      if ((*at)->file_.use_count() > 1) continue;
      (*at)->file_.reset();
      at = open_.erase(at);
    }
  }

  base::Mutex mutex_;
  std::list<Opened*> open_ SHARDOW_GUARDED_BY(mutex_);
  const size_t most_ = limit();
};

namespace {

[[noreturn]] void fail_changed(const base::Path& path, const char* how) {
  throw Error(Code::kIo, fmt::format("{} {} since it was opened; open the checkpoint again", path.string(), how),
              ESTALE);
}

}  // namespace

Opened::Opened(base::File file, std::shared_ptr<const base::File> directory)
    : path_(file.path()), identity_(file.identity()), directory_(std::move(directory)) {
  Handles::all().keep(*this, std::move(file));
}

Opened::~Opened() {
  Handles::all().forget(*this);
}

std::shared_ptr<const base::File> Opened::handle() {
  if (auto held = Handles::all().use(*this)) return held;
  const base::CallsTo scope(calls_);
  try {
    base::File again =
        directory_ ? base::File::open_in(*directory_, path_.filename().string()) : base::File::open(path_);
    if (again.identity() == identity_) return Handles::all().keep(*this, std::move(again));
  } catch (const Error& error) {
    if (error.code() != Code::kNotFound) throw;
  }
  fail_changed(path_, "was closed, since too many files were open, and replaced");
}

void Opened::check_unchanged() {
  if (handle()->identity() != identity_) fail_changed(path_, "was written over");
}

}  // namespace shardow::file

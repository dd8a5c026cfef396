#include "cli/terminal.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>

#include "base/files.h"

namespace shardow::cli {
namespace {

std::atomic<int> signalled{0};  // the signal
static_assert(std::atomic<int>::is_always_lock_free);

void ask(int signal) {
  signalled = signal;
}

std::string pending;  // for standard output
constexpr size_t kPiece = 64 << 10;

bool is_terminal(int fd) {
  const char* const term = std::getenv("TERM");
  return ::isatty(fd) != 0 && (term == nullptr || std::string_view(term) != "dumb");
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void prepare_process() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number, which is this one. The wrong way round, so that using it is an error as before.
    if (::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) std::_Exit(6);
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction how {};
    if (::sigaction(signal, nullptr, &how) != 0 || how.sa_handler == SIG_IGN) continue;
    how.sa_handler = ask;
    how.sa_flags = static_cast<int>(SA_RESETHAND);
    ::sigaction(signal, &how, nullptr);
  }
}

void check_interrupted() {
  if (const int signal = signalled) throw Interrupted{signal};
}

void die_of(int signal) {
  std::signal(signal, SIG_DFL);
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, signal);
  ::sigprocmask(SIG_UNBLOCK, &only, nullptr);
  std::raise(signal);
  std::_Exit(128 + signal);
}

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t done = ::write(fd, text.data(), text.size());
    if (done < 0 && errno == EINTR) {
      check_interrupted();
      continue;
    }
    if (done < 0) return errno;
    text.remove_prefix(static_cast<size_t>(done));
  }
  return 0;
}

void put(std::string_view text) {
  pending += text;
  if (pending.size() >= kPiece || is_terminal(STDOUT_FILENO)) flush_output();
}

void put_json(const Json& document) {
  put(document.document() + "\n");
}

void flush_output() {
  const std::string text = std::exchange(pending, {});
  const int error = write_all(STDOUT_FILENO, text);
  if (error == EPIPE) throw ClosedPipe{};
  if (error != 0) base::fail_io(error, "standard output", "cannot write");
}

void complain(std::string_view text) {
  write_all(STDERR_FILENO, fmt::format("shardow: {}\n", text));
}

std::string coloured(Colour colour, std::string_view text) {
  static const bool on = [] {
    const char* const no = std::getenv("NO_COLOR");
    return is_terminal(STDOUT_FILENO) && (no == nullptr || *no == '\0');
  }();
  return on ? fmt::format("\x1b[{}m{}\x1b[0m", static_cast<int>(colour), text) : std::string(text);
}

ProgressLine::ProgressLine(std::string what, bool wanted)
    : what_(std::move(what)), shows_(wanted && is_terminal(STDERR_FILENO)), begin_(now()) {}

ProgressLine::~ProgressLine() {
  if (shows_ && last_ >= 0) (void)!::write(STDERR_FILENO, "\r\x1b[K", 4);
}

void ProgressLine::tell(int64_t done, int64_t total) {
  if (!shows_) return;
  const double seconds = now();
  if (seconds - std::max(last_, begin_ + 0.2) < 0.1) return;  // nothing for what is over at once
  last_ = seconds;
  const double speed = static_cast<double>(done) / (seconds - begin_);
  const std::string left = done > 0 ? fmt::format(", {:.0f} s left", static_cast<double>(total - done) / speed) : "";
  const std::string line =
      fmt::format("\r\x1b[K{}: {} %, {} of {}, {}/s{}", what_, total > 0 ? 100 * done / total : 100, shown_bytes(done),
                  shown_bytes(total), shown_bytes(static_cast<int64_t>(speed)), left);
  (void)!::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace shardow::cli

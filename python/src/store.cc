// One thread of Python's for each connection asks a store of torch's: its host may stand still, and then answers
// nothing, and no wait of torch's can be interrupted.
#include "store.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/turns.h"
#include "core.h"
#include "group/rounds.h"
#include "shardow/error.h"

namespace nb = nanobind;

namespace shardow::python {
namespace {

constexpr std::chrono::milliseconds kPoll{100};
constexpr std::chrono::milliseconds kLeast{500};  // for an answer: the limit may have passed where nothing was asked

/// A question to a store, by the name that torch has for it.
struct Question {
  const char* name;
  std::string key;
  std::vector<std::string> values = {};
  std::optional<int64_t> number = {};
};

struct Answer {
  std::optional<std::string> text;
  int64_t number = 0;
};

/// Questions of all connections that torch has not answered. Torch's function takes the GIL when it returns, in a
/// destructor: after the interpreter's end Python ends the thread there, which aborts the process.
std::atomic<int64_t> unanswered = 0;

/// The questions of one connection, one after the other. A connection that was left is asked nothing more.
class Questions {
 public:
  ~Questions() {
    const base::Lock lock(mutex_);
    count(-pending_);
    if (!raised_.is_valid()) return;
    const nb::gil_scoped_acquire gil;
    raised_.reset();
  }

  /// `is_order`: its answer is dropped.
  void ask(Question question, bool is_order = false) {
    const base::Lock lock(mutex_);
    questions_.push_back(std::move(question));
    count(1);
    if (is_order) ++orders_;
    changed_.notify_all();
  }

  /// Nothing: not by then. Throws what was raised.
  std::optional<Answer> wait(Deadline until) {
    {
      const base::Lock lock(mutex_);
      for (bool in_time = true; !answer_ && !raised_.is_valid(); in_time = changed_.wait_until(mutex_, until)) {
        if (!in_time) return std::nullopt;
      }
      if (answer_) return std::exchange(answer_, std::nullopt);
    }
    const nb::gil_scoped_acquire gil;
    PyErr_SetObject(raised_.type().ptr(), raised_.ptr());
    nb::python_error error;
    throw_if_ours(error);
    throw std::move(error);
  }

  void leave() {
    const base::Lock lock(mutex_);
    is_left_ = true;
    count(-static_cast<int64_t>(questions_.size()));
    questions_.clear();
    changed_.notify_all();
  }

  /// For the thread, without the GIL; nothing where they are left.
  std::optional<Question> next() {
    const base::Lock lock(mutex_);
    while (questions_.empty() && !is_left_) changed_.wait_until(mutex_, Deadline::max());
    if (is_left_) return std::nullopt;
    Question next = std::move(questions_.front());
    questions_.pop_front();
    return next;
  }

  void answer(nb::handle value) {
    Answer answer;
    if (nb::isinstance<nb::bytes>(value)) {
      answer.text = text_of(value);
    } else if (!value.is_none()) {
      answer.number = nb::cast<int64_t>(nb::int_(value));
    }
    const base::Lock lock(mutex_);
    count(-1);
    if (orders_ > 0) {
      --orders_;
    } else {
      answer_ = std::move(answer);
    }
    changed_.notify_all();
  }

  void fail(nb::object raised) {
    const base::Lock lock(mutex_);
    count(-pending_);
    if (!is_left_) raised_ = std::move(raised);
    changed_.notify_all();
  }

 private:
  /// Counts questions that are asked, or with a minus sign answered or given up.
  void count(int64_t questions) SHARDOW_REQUIRES(mutex_) {
    pending_ += questions;
    unanswered += questions;
  }

  base::Mutex mutex_;
  base::Condition changed_;
  int64_t pending_ SHARDOW_GUARDED_BY(mutex_) = 0;  // not answered
  std::deque<Question> questions_ SHARDOW_GUARDED_BY(mutex_);
  size_t orders_ SHARDOW_GUARDED_BY(mutex_) = 0;  // not done
  std::optional<Answer> answer_ SHARDOW_GUARDED_BY(mutex_);
  nb::object raised_;  // once, and stays: the connection is of no more use
  bool is_left_ SHARDOW_GUARDED_BY(mutex_) = false;
};

using Connection = std::shared_ptr<Questions>;

/// (name, key, *values) or None. Plain C to Python: a thread that comes back when the interpreter has ended is ended
/// here, which no C++ may catch.
PyObject* next_question(PyObject* connection, PyObject*) {
  const auto questions = *static_cast<Connection*>(PyCapsule_GetPointer(connection, nullptr));
  PyThreadState* const state = PyEval_SaveThread();
  const std::optional<Question> question = questions->next();
  PyEval_RestoreThread(state);
  if (!question) Py_RETURN_NONE;
  nb::list words;
  words.append(question->name);
  words.append(question->key);
  for (const std::string& value : question->values) words.append(to_bytes(value));
  if (question->number) words.append(*question->number);
  return words.release().ptr();
}

nb::object next_of(const Connection& connection) {
  static PyMethodDef definition = {"next", next_question, METH_NOARGS, nullptr};
  const auto erase = [](PyObject* capsule) { delete static_cast<Connection*>(PyCapsule_GetPointer(capsule, nullptr)); };
  const nb::object self = nb::steal(PyCapsule_New(new Connection(connection), nullptr, erase));
  return nb::steal(PyCFunction_New(&definition, self.ptr()));
}

nb::module_ signals() {
  return nb::module_::import_("shardow.base.signals");
}

/// An exception that a signal's handler raised. It ends without the GIL; python_error takes that itself.
class PyInterruption final : public group::Interruption {
 public:
  explicit PyInterruption(nb::python_error raised) : raised_(std::move(raised)) {}

  bool put_off() override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<bool>(signals().attr("put_off")(raised_.value()));
  }

  std::exception_ptr exception(const std::string& waited) override {
    const nb::gil_scoped_acquire gil;
    if (waited.empty() || !raised_.matches(PyExc_KeyboardInterrupt)) return std::make_exception_ptr(std::move(raised_));
    PyErr_SetObject(PyExc_KeyboardInterrupt, to_text(waited).ptr());
    return std::make_exception_ptr(nb::python_error());
  }

 private:
  nb::python_error raised_;
};

class ThreadedStore final : public PyStore {
 public:
  explicit ThreadedStore(nb::object serve)
      : serve_(std::move(serve)),
        main_thread_(nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"))) {}

  ~ThreadedStore() override {
    if (Py_IsInitialized() == 0) return;  // a thread that wakes up finds no interpreter
    for (const Connection& connection : idle_) connection->leave();
    if (waiting_) waiting_->leave();
  }

  void set(const std::string& key, const std::string& value) override { ask({"set", key, {value}}); }
  bool check(const std::string& key) override { return ask({"check", key}).number != 0; }
  int64_t add(const std::string& key, int64_t amount) override { return ask({"add", key, {}, amount}).number; }
  void append(const std::string& key, const std::string& value) override { ask({"append", key, {value}}); }
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    return ask({"compare_set", key, {expected, desired}}).text.value();
  }
  void erase(const std::string& key) override {
    Connection connection = connected();
    connection->ask({"delete_key", key}, true);
    idle_.push_back(std::move(connection));
  }

  /// The wait goes on where it ends at its deadline, and is taken up again where the same key is wanted.
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    if (waiting_ && awaited_ != key) {
      if (waiting_->wait(base::now()))
        idle_.push_back(waiting_);
      else
        waiting_->leave();
      waiting_ = nullptr;
    }
    for (;;) {
      if (!waiting_) {
        waiting_ = connected();
        awaited_ = key;
        waiting_->ask({"get", key});
      }
      const Deadline limit = this->limit();
      auto answer = wait(waiting_, std::min(deadline, limit));
      if (!answer && deadline <= limit) return std::nullopt;
      if (!answer) throw_silent(waiting_);
      idle_.push_back(std::exchange(waiting_, nullptr));
      if (answer->text) return std::move(answer->text);  // else torch has waited long enough
    }
  }

  void answer_by(Deadline limit, double asked) override {
    limit_ = limit;
    asked_ = asked;
  }

  bool is_silent() const noexcept override { return is_silent_; }

 private:
  Connection connected() {
    if (!idle_.empty()) {
      Connection connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
    const nb::gil_scoped_acquire gil;
    const auto made = std::make_shared<Questions>();
    serve_(next_of(made), nb::cpp_function([made](nb::handle value) { made->answer(value); }, nb::arg().none()),
           nb::cpp_function([made](nb::object raised) { made->fail(std::move(raised)); }));
    return made;
  }

  Answer ask(Question question) {
    Connection connection = connected();
    connection->ask(std::move(question));
    auto answer = wait(connection, limit());
    if (!answer) throw_silent(connection);
    idle_.push_back(std::move(connection));
    return std::move(*answer);
  }

  /// Returns by when a question must be answered that is asked at this moment.
  Deadline limit() const { return std::max(limit_, base::after(kLeast)); }

  /// Leaves the connection where it throws: its thread goes on with the one question. Time in which the process was
  /// stopped does not count: the answer is there, for a thread that was stopped as well.
  std::optional<Answer> wait(Connection& connection, Deadline until) {
    try {
      for (;;) {
        const Deadline end = base::after(kPoll), look = std::min(until, end);
        if (auto answer = connection->wait(look)) {
          is_silent_ = false;
          return answer;
        }
        poll();
        const auto stopped = base::now() - end;
        if (stopped > kPoll && until < Deadline::max() - stopped) until += stopped;
        if (look >= until) return std::nullopt;
      }
    } catch (...) {
      std::exchange(connection, nullptr)->leave();
      throw;
    }
  }

  void poll() const {
    if (PyThread_get_thread_ident() != main_thread_) return;
    const nb::gil_scoped_acquire gil;
    try {
      signals().attr("deliver")();
    } catch (nb::python_error& raised) {
      interrupt(std::move(raised));
    }
  }

  [[noreturn]] void throw_silent(Connection& connection) {
    std::exchange(connection, nullptr)->leave();
    is_silent_ = true;
    throw Error(Code::kTimeout, fmt::format("the store of the process group did not answer within {:g} s: its host "
                                            "stands still, or cannot be reached",
                                            asked_));
  }

  const nb::object serve_;
  const unsigned long main_thread_;  // the only one that signals interrupt
  std::vector<Connection> idle_;
  Connection waiting_;   // for a key that others write
  std::string awaited_;  // that key
  Deadline limit_ = Deadline::max();
  double asked_ = 0;  // seconds
  bool is_silent_ = false;
};

}  // namespace

void await_answers(double seconds) {
  const nb::gil_scoped_release release;
  constexpr std::chrono::milliseconds kPause{1};
  for (double waited = 0; unanswered > 0 && waited < seconds; waited += 1e-3) std::this_thread::sleep_for(kPause);
}

std::unique_ptr<PyStore> py_store(nb::object serve) {
  static const int forked = ::pthread_atfork(nullptr, nullptr, [] { unanswered = 0; });  // a child has no thread
  static_cast<void>(forked);
  return std::make_unique<ThreadedStore>(std::move(serve));
}

void interrupt(nb::python_error raised) {
  throw PyInterruption(std::move(raised));
}

}  // namespace shardow::python

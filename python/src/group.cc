// Group crosses both ways: C++ fillings are usable from Python, and a Python subclass
// (shardow.ranks.store_group.StoreGroup) fills the interface for C++.
#include "shardow/group.h"

#include <nanobind/stl/chrono.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <nanobind/trampoline.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

#include "callbacks.h"
#include "comm/agree.h"
#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

std::string text_of(nb::handle one) {
  const auto bytes = nb::cast<nb::bytes>(one);
  return {bytes.c_str(), bytes.size()};
}

double seconds_left(Deadline deadline) {
  return std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count();
}

template <class Fn>
auto in_python(Fn fn) {
  const nb::gil_scoped_acquire gil;
  try {
    return fn();
  } catch (const nb::python_error& raised) {
    throw_if_ours(raised);
    throw;
  }
}

/// What a Python subclass provides: its rank and size to the constructor, begin(call, seconds) where it has names for
/// rounds, all_gather(bytes, seconds) -> list of bytes, decide(bytes, callable, seconds) -> two bytes where it has a
/// way of its own, broadcast and so on over buffers.
struct PyGroup final : Group {
  NB_TRAMPOLINE(Group, 3);

  PyGroup(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  bool moves_blocks() const noexcept override { return moves_blocks_; }
  void set_moves_blocks(bool moves) { moves_blocks_ = moves; }

  void begin(std::string_view call, std::chrono::milliseconds timeout) override {
    in_python([&] {
      const nb::object named = nb::getattr(self(), "begin", nb::none());
      if (!named.is_none()) named(nb::str(call.data(), call.size()), std::chrono::duration<double>(timeout).count());
    });
  }

  std::vector<std::string> all_gather(std::string_view mine, Deadline deadline) override {
    return in_python([&] {
      nb::list answer =
          nb::cast<nb::list>(self().attr("all_gather")(nb::bytes(mine.data(), mine.size()), seconds_left(deadline)));
      std::vector<std::string> all;
      for (nb::handle one : answer) all.push_back(text_of(one));
      return all;
    });
  }

  Answer decide(std::string_view mine, const Decide& decide, Deadline deadline) override {
    return in_python([&] {
      const nb::object theirs = nb::getattr(self(), "decide", nb::none());
      if (theirs.is_none()) return Group::decide(mine, decide, deadline);
      const nb::object weigh = nb::cpp_function([&decide](const nb::list& everybody) {
        std::vector<std::string> all;
        for (nb::handle one : everybody) all.push_back(text_of(one));
        const Decision made = decide(all);
        nb::list each;
        for (const std::string& one : made.each) each.append(nb::bytes(one.data(), one.size()));
        return nb::make_tuple(nb::bytes(made.common.data(), made.common.size()), each);
      });
      const auto answer =
          nb::cast<nb::tuple>(theirs(nb::bytes(mine.data(), mine.size()), weigh, seconds_left(deadline)));
      return Answer{text_of(answer[0]), text_of(answer[1])};
    });
  }

  void all_reduce(std::span<uint64_t> values, Op op, Deadline deadline) override {
    const char* name = op == Op::kSum ? "sum" : op == Op::kMax ? "max" : "xor";
    in_python([&] { self().attr("all_reduce")(view(std::as_writable_bytes(values)), name, seconds_left(deadline)); });
  }

  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    in_python([&] { self().attr("broadcast")(view(bytes), root, seconds_left(deadline)); });
  }

  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    in_python([&] {
      self().attr("send")(view({const_cast<std::byte*>(bytes.data()), bytes.size()}), to, seconds_left(deadline));
    });
  }

  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    in_python([&] { self().attr("recv")(view(bytes), from, seconds_left(deadline)); });
  }

 private:
  nb::handle self() const { return nb_trampoline.base(); }

  /// Borrowed: valid during the call alone.
  static nb::object view(std::span<std::byte> bytes) {
    return nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(bytes.data()),
                                             static_cast<Py_ssize_t>(bytes.size()), PyBUF_WRITE));
  }

  const int rank_, size_;
  bool moves_blocks_ = true;
};

std::vector<nb::bytes> all_gather(Group& group, const nb::bytes& mine, double timeout) {
  std::vector<std::string> all;
  {
    const std::string_view data(mine.c_str(), mine.size());
    nb::gil_scoped_release release;
    all = group.all_gather(data, in_seconds(timeout));
  }
  std::vector<nb::bytes> result;
  for (const std::string& one : all) result.emplace_back(one.data(), one.size());
  return result;
}

/// Python's exceptions stay on their rank. Those that are none of Exception (KeyboardInterrupt) leave at once,
/// without a word to the others. `words_of`: of the result of fn(), for `sum_up`. Returns the result, and the sum.
std::pair<nb::object, std::string> agree_in_python(Group& group, const std::string& call, double timeout,
                                                   const nb::callable& fn, double behind,
                                                   std::string (*words_of)(nb::handle), const comm::SumUp& sum_up) {
  constexpr double kToTell = 1;
  nb::object result;
  std::exception_ptr raised;
  std::string message, words, common;
  double patience = timeout + behind;
  try {
    result = fn();
    words = words_of(result);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    raised = std::current_exception();
    message = without_stack(error);
    if (error.matches(PyExc_TimeoutError)) patience = std::min(timeout, kToTell);  // it has waited for others already
  }
  try {
    const nb::gil_scoped_release release;
    group.begin(call, milliseconds(timeout));
    const auto step = [&] {
      if (raised) throw std::runtime_error(message);
      return words;
    };
    common = comm::agree_on(group, in_seconds(patience), step, sum_up);
  } catch (...) {
    if (raised) std::rethrow_exception(raised);
    throw;
  }
  return {std::move(result), std::move(common)};
}

nb::object agree(Group& group, const std::string& call, double timeout, const nb::callable& fn, double behind) {
  const auto nothing = [](nb::handle) { return std::string(); };
  return agree_in_python(group, call, timeout, fn, behind, nothing, comm::of_first).first;
}

nb::bytes agree_on(Group& group, const std::string& call, double timeout, const nb::callable& fn,
                   const nb::callable& weigh) {
  const auto sum_up = [&](const std::vector<std::string>& words) {
    return in_python([&] {
      nb::list all;
      for (const std::string& word : words) all.append(nb::bytes(word.data(), word.size()));
      return text_of(weigh(all));
    });
  };
  const std::string common = agree_in_python(group, call, timeout, fn, 0.0, text_of, sum_up).second;
  return nb::bytes(common.data(), common.size());
}

}  // namespace

void bind_group(nb::module_& m) {
  nb::class_<Group, PyGroup>(m, "Group", "The ranks that act together.")
      .def(nb::init<int, int>(), "rank"_a, "size"_a)
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def_prop_rw("moves_blocks", &Group::moves_blocks,
                   [](Group& group, bool moves) { dynamic_cast<PyGroup&>(group).set_moves_blocks(moves); });
  m.def("solo", &solo, "A group of one rank, which never waits.");
  m.def("group_all_gather", &all_gather, "group"_a, "mine"_a, "timeout"_a,
        "Every rank's bytes, indexed by rank. Collective.");
  m.def("agree", &agree, "group"_a, "call"_a, "timeout"_a, "fn"_a, "behind"_a = 0.0,
        "Runs fn on every rank and returns what it returned, or raises on all ranks if it raised on any: its own error "
        "where it did, "
        "ConnectionError elsewhere. `timeout`, in seconds, begins when fn is done, and `behind` beyond it for a rank "
        "that does wait; one "
        "whose fn raised TimeoutError waits a second at most. Collective; `call` is its name in messages.");
  m.def("agree_on", &agree_on, "group"_a, "call"_a, "timeout"_a, "fn"_a, "weigh"_a,
        "agree(), in the same round with what weigh() makes, on one rank, of the bytes that fn returned on each; empty "
        "where all are.");
}

}  // namespace shardow::python

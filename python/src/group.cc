// Groups for Python. Rounds are C++'s, over a store of torch's (store.h); a subclass of Python's
// (shardow.distributed.store_group.StoreGroup) moves blocks.
#include "shardow/group.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <nanobind/trampoline.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "callbacks.h"
#include "core.h"
#include "group/collective_call.h"
#include "group/facts.h"
#include "group/store_group.h"
#include "store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

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

/// A group whose subclass in Python provides broadcast, send and recv over buffers, where it moves blocks.
struct PyGroup final : group::StoreGroup {
  NB_TRAMPOLINE(group::StoreGroup, 3);

  PyGroup(int rank, std::vector<int> ranks, nb::object serve)
      : PyGroup(py_store(std::move(serve)), rank, std::move(ranks)) {}

  bool moves_blocks() const noexcept override { return moves_blocks_; }
  void set_moves_blocks(bool moves) { moves_blocks_ = moves; }
  PyStore& python_store() { return static_cast<PyStore&>(store()); }

  void broadcast(std::span<std::byte> bytes, int root, Deadline deadline) override {
    if (!moves_blocks_) return StoreGroup::broadcast(bytes, root, deadline);
    in_python([&] { self().attr("broadcast")(view(bytes), root, seconds_left(deadline)); });
  }

  void send(std::span<const std::byte> bytes, int to, Deadline deadline) override {
    if (!moves_blocks_) return StoreGroup::send(bytes, to, deadline);
    const std::span own(const_cast<std::byte*>(bytes.data()), bytes.size());
    in_python([&] { self().attr("send")(view(own), to, seconds_left(deadline)); });
  }

  void recv(std::span<std::byte> bytes, int from, Deadline deadline) override {
    if (!moves_blocks_) return StoreGroup::recv(bytes, from, deadline);
    in_python([&] { self().attr("recv")(view(bytes), from, seconds_left(deadline)); });
  }

 private:
  PyGroup(std::unique_ptr<Store> store, int rank, std::vector<int> ranks)
      : StoreGroup(std::move(store), {*store, "", "", std::move(ranks), static_cast<size_t>(rank), false}) {}

  nb::handle self() const { return nb_trampoline.base(); }

  /// Borrowed: valid during the call alone.
  static nb::object view(std::span<std::byte> bytes) {
    return nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(bytes.data()),
                                             static_cast<Py_ssize_t>(bytes.size()), PyBUF_WRITE));
  }

  bool moves_blocks_ = true;
};

/// Returns a decision that Python makes of all ranks' words. Its exception is all ranks' error, or interrupts the
/// round.
template <class Fn>
auto weighed(const std::vector<std::string>& by_rank, Fn fn) {
  const nb::gil_scoped_acquire gil;
  try {
    nb::list all;
    for (const std::string& words : by_rank) all.append(to_bytes(words));
    return fn(all);
  } catch (nb::python_error& raised) {
    throw_if_ours(raised);
    if (by_rank.size() == 1) throw;  // a rank alone has no round to interrupt
    if (!raised.matches(PyExc_Exception)) interrupt(std::move(raised));
    throw std::runtime_error(without_stack(raised));
  }
}

/// A comparison whose steps a subclass of Python's makes.
struct PyComparison final : group::Comparison {
  NB_TRAMPOLINE(group::Comparison, 3);

  std::string words() override {
    const nb::gil_scoped_acquire gil;
    return raising([&] { return text_of(self().attr("words")()); });
  }
  std::string sum_up(const std::vector<std::string>& by_rank) const override {
    return weighed(by_rank, [&](const nb::list& all) { return text_of(self().attr("sum_up")(all)); });
  }
  void take(group::CollectiveCall& /*call*/, const std::string& total) override {
    const nb::gil_scoped_acquire gil;
    if (nb::hasattr(self(), "take")) self().attr("take")(to_bytes(total));
  }

 private:
  nb::handle self() const { return nb_trampoline.base(); }
};

std::vector<nb::bytes> all_gather(Group& group, const nb::bytes& mine, double timeout) {
  std::vector<std::string> all;
  {
    const std::string_view data(mine.c_str(), mine.size());
    const nb::gil_scoped_release release;
    all = group.all_gather(data, in_seconds(timeout));
  }
  std::vector<nb::bytes> result;
  for (const std::string& one : all) result.push_back(to_bytes(one));
  return result;
}

std::pair<nb::bytes, nb::bytes> decide(Group& group, const nb::bytes& mine, const nb::callable& weigh, double timeout) {
  const auto made_by = [&](const nb::list& all) {
    const auto made = nb::cast<nb::tuple>(weigh(all));
    group::Ranks::Decision decision{text_of(made[0])};
    for (nb::handle words : made[1]) decision.each.push_back(text_of(words));
    return decision;
  };
  group::Ranks::Met met;
  {
    const std::string_view data(mine.c_str(), mine.size());
    const nb::gil_scoped_release release;
    const auto choose = [&](const auto& by_rank) { return weighed(by_rank, made_by); };
    met = group::ranks_of(group).decide(data, choose, in_seconds(timeout));
  }
  return {to_bytes(met.common), to_bytes(met.own)};
}

nb::bytes compare_set(group::StoreGroup& group, const std::string& key, const std::string& expected,
                      const std::string& desired, double timeout) {
  std::string value;
  {
    const nb::gil_scoped_release release;
    group.store().answer_by(in_seconds(timeout), timeout);
    value = group.store().compare_set(key, expected, desired);
  }
  return to_bytes(value);
}

/// Python's exceptions stay on their rank. Those that are none of Exception (KeyboardInterrupt) leave at once, without
/// a word to the others.
void step(Group& group, const std::string& call, double timeout, const nb::callable& prepare, double behind) {
  constexpr double kToTell = 1;
  group::CollectiveCall ranks(group, milliseconds(timeout + behind));
  nb::object kept;
  const auto compared = [&] {
    const nb::gil_scoped_acquire gil;
    try {
      kept = prepare();
    } catch (nb::python_error& raised) {
      if (!raised.matches(PyExc_Exception)) interrupt(std::move(raised));
      // It has waited for others already.
      if (raised.matches(PyExc_TimeoutError)) ranks.set_timeout(milliseconds(std::min(timeout, kToTell)));
      throw Raised(std::move(raised));
    }
    return comparisons_of(kept);
  };
  const nb::gil_scoped_release release;
  group.begin(call, milliseconds(timeout));
  ranks.compare(compared);
}

}  // namespace

group::Comparisons comparisons_of(nb::handle list) {
  return nb::cast<group::Comparisons>(list);
}

group::Facts facts_of(const nb::list& facts) {
  group::Facts all;
  for (const nb::handle fact : facts)
    all.push_back({bytes_of(fact[0]), bytes_of(fact[1]), bytes_of(fact[2]), bytes_of(fact[3])});
  return all;
}

void bind_group(nb::module_& m) {
  nb::class_<Group>(m, "Group", "The ranks that act together.")
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def(
          "begin",
          [](Group& group, const std::string& call, double timeout) { group.begin(call, milliseconds(timeout)); },
          "call"_a, "timeout"_a, "The next round is `call`'s first; rounds after it are its later steps.")
      .def("all_gather", &all_gather, "mine"_a, "timeout"_a, "Every rank's bytes, by rank. Collective.")
      .def("decide", &decide, "mine"_a, "weigh"_a, "timeout"_a,
           "What weigh() makes, on one rank, of all ranks' bytes: (bytes for all, bytes for each rank, or none). "
           "Returns those for all, and those for this rank; both empty, and weigh() is not called, where no rank has "
           "any. Collective.");
  m.def("await_answers", &await_answers, "seconds"_a,
        "Waits until torch's stores have answered what this process has asked, or so many seconds.");
  nb::class_<group::StoreGroup, Group, PyGroup>(m, "StoreGroup", "Ranks that meet in a store.")
      .def(nb::init<int, std::vector<int>, nb::object>(), "rank"_a, "ranks"_a, "serve"_a,
           "`ranks`, by their names in messages. `serve(next, answer, fail)` starts a thread that asks a store of "
           "torch's what next() returns, as (name, key, values), until that is None, and tells what came of it.")
      .def_prop_rw("moves_blocks", &group::Ranks::moves_blocks,
                   [](group::StoreGroup& group, bool moves) { dynamic_cast<PyGroup&>(group).set_moves_blocks(moves); })
      .def_prop_ro("rounds", &group::StoreGroup::rounds, "How many this rank has come to.")
      .def_prop_ro(
          "is_silent",
          [](group::StoreGroup& group) { return dynamic_cast<PyGroup&>(group).python_store().is_silent(); },
          "The store did not answer the last time.")
      .def("refuse", &group::StoreGroup::refuse, "call"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Ends the next round for all, since this rank was interrupted in `call`.")
      .def("compare_set", &compare_set, "key"_a, "expected"_a, "desired"_a, "timeout"_a,
           "The store's own, of other keys.");
  nb::class_<group::Comparison, PyComparison>(
      m, "Comparison",
      "One rank's part of a comparison. A subclass has words(), this rank's bytes for a round; sum_up(by_rank), on one "
      "rank, the bytes that all ranks' words come to, of which some may be empty; and take(total), which every rank "
      "does with those, where there is anything to do. What words() raises on one rank, and sum_up(), all raise.")
      .def(nb::init<>());
  nb::class_<group::EqualFacts, group::Comparison>(m, "EqualFacts", "Compares facts: (name, value, hint, set).")
      .def(nb::new_(
               [](const std::string& call, const nb::list& facts) { return group::EqualFacts(call, facts_of(facts)); }),
           "call"_a, "facts"_a);
  m.def("solo", &solo, "A group of one rank, which never waits.");
  m.def("step", &step, "group"_a, "call"_a, "timeout"_a, "prepare"_a, "behind"_a = 0.0,
        "Compares on all ranks what prepare() returns on each, a list, in one round; or raises on all ranks if it "
        "raised on any: its own error where it did, ConnectionError elsewhere. `timeout`, in seconds, begins when "
        "prepare is done, and `behind` beyond it for a rank that does wait; one that raised TimeoutError waits a "
        "second at most. Collective; `call` is its name in messages.");
}

}  // namespace shardow::python

#include "hooks.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <map>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "average/chunk_table.h"
#include "average/ring_swap.h"
#include "base/worker.h"
#include "file/header_fixture.h"
#include "group_checks.h"
#include "kernels/kernels.h"
#include "roofline.h"
#include "shardow/group.h"
#include "tensor/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::hooks {
namespace {

std::atomic<int> swap_steps_left = 0, swap_failures_left = 0;

void fail_swap_step() {
  if (swap_steps_left-- > 0 || swap_failures_left == 0) return;
  --swap_failures_left;
  throw std::bad_alloc();
}

bool fail_swaps(int steps, int failures) {
  static int wanted = 0;
  const bool failed = swap_failures_left < wanted;
  swap_steps_left = steps;
  swap_failures_left = wanted = failures;
  average::swap_seam = failures > 0 ? fail_swap_step : nullptr;
  return failed;
}

std::atomic<bool> updates_held = false;

void hold_updates(bool held) {
  if (!base::worker_seam) base::worker_seam = [] { updates_held.wait(true); };
  updates_held = held;
  updates_held.notify_all();
}

struct Limit {
  std::vector<kernels::Chunk> chunks;
  int num_averages;
};

using Strings = std::map<std::string, std::string>;

nb::bytes header_of(const std::vector<std::tuple<std::string, std::string, Shape>>& tensors, const Strings& metadata) {
  std::vector<file::Entry> entries;
  for (const auto& [name, dtype, shape] : tensors) entries.push_back({name, dtype_from_name(dtype), shape, 0, 0});
  const file::Header header = file::lay_out(std::move(entries), metadata);
  const std::string bytes = file::header_bytes(header.entries, header.metadata, header.data_begin);
  return nb::bytes(bytes.data(), bytes.size());
}

nb::tuple parse_header(const nb::bytes& json, int64_t data_bytes) {
  const file::Header header = file::parse_header(std::string_view(json.c_str(), json.size()), data_bytes, "header");
  nb::list entries;
  for (const file::Entry& entry : header.entries) {
    const std::string dtype(dtype_name(entry.dtype));
    entries.append(nb::make_tuple(entry.name, dtype, entry.shape, entry.begin, entry.end));
  }
  return nb::make_tuple(entries, header.metadata);
}

std::vector<std::pair<std::string, std::vector<std::string>>> failed_checks(Group& group) {
  std::vector<std::pair<std::string, std::vector<std::string>>> failed;
  const nb::gil_scoped_release release;
  for (const GroupCheck& check : group_checks()) {
    if (std::vector<std::string> failures = check.run(group); !failures.empty())
      failed.emplace_back(check.name, std::move(failures));
  }
  return failed;
}

nb::list thread_groups(int size) {
  nb::list groups;
  for (auto& group : threads(size)) groups.append(nb::cast(std::move(group)));
  return groups;
}

}  // namespace

void bind(nb::module_& m) {
  nb::module_ h = m.def_submodule("hooks", "What tests and benchmarks stop, count or call in the engine.");
  h.def("fail_swaps", &fail_swaps, "steps"_a, "failures"_a,
        "Lets `steps` steps of swaps succeed from now on; the `failures` steps after them raise MemoryError. Returns "
        "whether a step has failed since the last call.");
  h.def("hold_updates", &hold_updates, "held"_a,
        "While held, updates in the background have begun and do nothing yet.");
  h.def("group_checks", &failed_checks, "group"_a,
        "Runs the conformance checks of tests/groups. Returns the checks that failed, with the failures of each. "
        "Collective.");
  h.def("threads", &thread_groups, "n"_a, "Returns a group for each of n ranks in this process, for one thread each.");
  h.def("header_of", &header_of, "tensors"_a, "metadata"_a,
        "Returns the bytes before the data in a file of [(name, dtype, shape)].");
  h.def(
      "parse_header", &parse_header, "json"_a, "data_bytes"_a,
      "Returns ([(name, dtype, shape, begin, end)], metadata) of a safetensors header; raises ValueError where a rule "
      "is broken.");
  h.def("simd_target", &kernels::cpu::target, "Returns the instruction set that the CPU kernels use.");
  nb::class_<Limit>(h, "Limit", "Does an update's loads and stores with one maximum in place of the average.")
      .def(
          "__init__",
          [](Limit* self, const std::vector<TensorView>& parameters,
             const std::vector<std::vector<TensorView>>& averages) {
            new (self) Limit{average::make_chunks(parameters, averages), static_cast<int>(averages.size())};
          },
          "parameters"_a, "averages"_a)
      .def(
          "update", [](const Limit& self) { kernels::roofline::update(self.chunks, self.num_averages); },
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace shardow::hooks

// Averages with their state in files.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "average/replicas.h"
#include "core.h"
#include "ema/agreed.h"
#include "ema/loading.h"
#include "ema/names.h"
#include "file_options.h"
#include "shardow/ema_file.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

using Keys = std::vector<std::string>;

std::vector<std::pair<std::string, Strings>> files_of(const Average& average, const std::string& state) {
  std::vector<std::pair<std::string, Strings>> files;
  for (SaveFile& file : ema_files_with(average, state))
    files.emplace_back(std::move(file.name), std::move(file.metadata));
  return files;
}

}  // namespace

void bind_ema(nb::module_& m) {
  m.attr("STATE_KEY") = kStateKey;
  m.def(
      "decay_keys", [](const std::vector<Schedule>& schedules) { return decay_keys(schedules); }, "schedules"_a,
      "key() of each; equal schedules are refused, since nothing could tell their averages apart.");
  m.def("decay_keys_in", &decay_keys_in, "metadata"_a, "Of a file's metadata; [] where it is no saved EMA.");
  m.def("ema_file_name", &ema_file_name, "key"_a, "Of one of several averages in a saved EMA's directory.");
  m.def(
      "ema_files_in",
      [](const std::filesystem::path& directory, bool beside_a_model) {
        std::vector<EmaFile> found;
        {
          const nb::gil_scoped_release release;
          found = ema_files_in(directory, beside_a_model);
        }
        nb::dict files;
        for (const EmaFile& one : found) files[nb::cast(one.key)] = one.name;
        return files;
      },
      "directory"_a, "beside_a_model"_a = true,
      "{decay: file name} of the EMA with several decays that was saved there last; {} where there is none.");
  m.def("ema_files", &files_of, "average"_a, "state"_a,
        "[(name, metadata)] of the files of a saved EMA, one for each average.");
  const group::Fact updates = average::updates_fact(0);
  m.attr("UPDATES") = nb::make_tuple(updates.name, updates.way_out);
  nb::class_<ema::EqualStates, group::Comparison>(m, "EqualStates", "Compares the states of EMAs, and facts.")
      .def(nb::new_([](const std::string& call, const std::string& state, const nb::list& facts) {
             return ema::EqualStates(call, state, facts_of(facts));
           }),
           "call"_a, "state"_a, "facts"_a)
      .def_prop_ro("state", &ema::EqualStates::state,
                   "This rank's, with what each rank counts for itself summed once that was taken.");
  m.def(
      "taken_as",
      [](const Keys& saved, const Keys& own, OptionsFrom from, const std::filesystem::path& where) {
        return ema::taken_as(saved, own, from, where.string());
      },
      "theirs"_a, "own"_a, "options"_a, "where"_a,
      "The key in a saved EMA of each average here; raises where their numbers differ.");
  nb::class_<ema::Loading>(m, "Loading", "Averages that go on from saved ones: what one rank does in a load.")
      .def(nb::init<Average&, OptionsFrom>(), "average"_a, "options"_a, nb::keep_alive<1, 2>())
      .def("names_at", &ema::Loading::names_at, "path"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Of the files there, in the order of the averages; [] where the path is the file.")
      .def("look", &ema::Loading::look, "metadata"_a, "files"_a, "where"_a,
           "Raises what does not fit. `metadata`: of the first of so many files.")
      .def("begin", &ema::Loading::begin, "rank"_a, "Takes the state.")
      .def("give_up", &ema::Loading::give_up, "Makes the state what it was before begin().")
      .def_prop_ro(
          "changed",
          [](const ema::Loading& loading) {
            return list_of(loading.changed(),
                           [](const auto& option) { return std::tuple(option.name, option.file, option.own); });
          },
          "[(name, there, here)] of the options that are others now.");
}

}  // namespace shardow::python

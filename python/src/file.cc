// Saving and loading; the engine's threads of control wait for other ranks without the GIL.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "base/files.h"
#include "callbacks.h"
#include "core.h"
#include "file/call.h"
#include "file/crc.h"
#include "file/header.h"
#include "file/load.h"
#include "file/path_lock.h"
#include "file/staging.h"
#include "file_options.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

file::Request request_of(std::vector<SaveFile> files, const base::Path& path, const std::optional<std::string>& dtype,
                         int64_t max_shard_size, const Strings& texts, const std::string& commit) {
  auto options = writing<SaveOptions>(dtype, max_shard_size, {}, 0.0, {});
  options.texts = texts;
  options.commit = commit;
  return {std::move(files), path, std::move(options)};
}

/// Returns a preparation by Python's look(), whose list `kept` keeps.
group::CollectiveCall::Prepare looking(Callbacks& callbacks, const nb::object& steps, nb::object& kept) {
  return [&] {
    const auto look = [&] { return comparisons_of(kept = steps.attr("look")()); };
    return callbacks.call("", look, false);
  };
}

/// StagedSave and what it refers to: the group, and who is told of progress.
class Save {
 public:
  Save(nb::object group, const nb::callable& request, double timeout, const nb::object& metadata)
      : group_(std::move(group)) {
    const auto ask = [&] {
      nb::object asked;
      std::tie(asked, told_, compared_) = nb::cast<std::tuple<nb::object, nb::object, nb::object>>(request());
      auto own = std::move(nb::cast<file::Request&>(asked));
      own.options.progress = callbacks_.progress(told_);
      return own;
    };
    file::SaveCall call{[&] { return callbacks_.call("", ask, false); }};
    call.compared = [&] {
      const nb::gil_scoped_acquire gil;
      return comparisons_of(compared_);
    };
    if (!metadata.is_none()) {
      call.metadata = [&] { return callbacks_.call("", [&] { return nb::cast<std::vector<Strings>>(metadata()); }); };
    }
    Group& ranks = nb::cast<Group&>(group_);
    callbacks_.run([&] { save_ = call.begin(ranks, milliseconds(timeout)); });
  }

  size_t staging_bytes() const { return save_->staging_bytes(); }

  void stage(uintptr_t memory, int64_t bytes) {
    const nb::gil_scoped_release release;
    save_->stage({reinterpret_cast<std::byte*>(memory), static_cast<size_t>(bytes)});
  }

  nb::dict write() {
    SaveReport report;
    callbacks_.run([&] { report = save_->write(); });
    return written(report);
  }

 private:
  nb::object group_, told_, compared_;
  Callbacks callbacks_;
  std::unique_ptr<StagedSave> save_;
};

void while_locked(const base::Path& path, const nb::callable& work) {
  const nb::gil_scoped_release release;
  const file::PathLock lock(path, file::Until());
  const nb::gil_scoped_acquire gil;
  work();
}

/// Opens checkpoints, as the methods of `steps` say.
void open_checkpoints(Group& group, const nb::object& steps, double timeout) {
  Callbacks callbacks;
  nb::object compared;
  file::Finding finding;
  finding.compared = looking(callbacks, steps, compared);
  finding.find = [&] {
    return callbacks.call("", [&] { return file::Location{nb::cast<std::vector<base::Path>>(steps.attr("find")())}; });
  };
  finding.opened = [&](const file::Location&, const file::Catalogs& catalogs) {
    callbacks.call("", [&] { steps.attr("opened")(list_of(catalogs, file::Inside::make)); });
    return group::Comparisons();
  };
  group::CollectiveCall ranks(group, milliseconds(timeout));
  callbacks.run([&] { finding.run(ranks); });
}

/// A load whose steps are the methods of `steps`.
nb::list load_files(Group& group, const nb::object& steps, bool verify, bool check_only, double timeout,
                    const nb::object& progress) {
  Callbacks callbacks;
  const LoadOptions options = reading(true, verify, check_only, timeout, callbacks.progress(progress));
  nb::object compared;
  file::LoadCall call;
  call.compared = looking(callbacks, steps, compared);
  call.find = [&] {
    return callbacks.call("", [&] {
      auto [path, names, words] =
          nb::cast<std::tuple<base::Path, std::vector<std::string>, nb::bytes>>(steps.attr("find")());
      return file::Location{{std::move(path)}, std::move(names), text_of(words)};
    });
  };
  call.choose = [&](const std::string& words, const file::Catalogs& catalogs) {
    return callbacks.call("", [&] {
      std::vector<file::Chosen> chosen;
      for (const nb::handle file : steps.attr("choose")(to_bytes(words), list_of(catalogs, file::Inside::make))) {
        auto [views, strict] = nb::cast<std::pair<std::vector<TensorView>, bool>>(file);
        chosen.push_back({std::move(views), strict});
      }
      return chosen;
    });
  };
  call.begin = [&](const std::vector<LoadReport>& reports) {
    callbacks.call("", [&] { steps.attr("begin")(list_of(reports, dict_of)); });
  };
  call.end = [&] { callbacks.call("", [&] { steps.attr("end")(); }); };
  std::vector<LoadReport> reports;
  callbacks.run([&] { reports = call.run(group, options); });
  return list_of(reports, dict_of);
}

nb::dict tensors_in(const Checkpoint& checkpoint) {
  nb::dict tensors;
  std::map<std::pair<DType, Shape>, nb::object> known;  // one object for all that are alike
  for (const file::Stored& stored : file::Inside::of(checkpoint).tensors) {
    const file::Entry& entry = stored.entry;
    nb::object& form = known[{entry.dtype, entry.shape}];
    if (!form.is_valid()) form = nb::make_tuple(std::string(dtype_name(entry.dtype)), nb::tuple(nb::cast(entry.shape)));
    tensors[nb::cast(entry.name)] = form;
  }
  return tensors;
}

}  // namespace

void bind_file(nb::module_& m) {
  nb::class_<SaveFile>(
      m, "SaveFile",
      "One of the files that a save makes: its name (empty: named as Hugging Face does), tensors and metadata.")
      .def(nb::init<std::string, std::vector<TensorView>, Strings>(), "name"_a, "tensors"_a, "metadata"_a = Strings());
  nb::class_<file::Request>(m, "SaveRequest", "What one rank is asked to save; see include/shardow/checkpoint.h.")
      .def(nb::new_(&request_of), "files"_a, "path"_a, "dtype"_a = nb::none(), "max_shard_size"_a = 0,
           "texts"_a = Strings(), "commit"_a = "");
  nb::class_<Save>(
      m, "Save",
      "A save in steps; see StagedSave in include/shardow/checkpoint.h. Making it is collective, and so is write().")
      .def(nb::init<nb::object, const nb::callable&, double, const nb::object&>(), "group"_a, "request"_a,
           "timeout"_a = 600.0, "metadata"_a = nb::none(),
           "`request()` returns this rank's SaveRequest, who is told of progress or None, and what ranks compare, a "
           "list; what it raises ends the save on all ranks. When that is compared, `metadata()` returns more metadata "
           "of each file on every rank.")
      .def_prop_ro("staging_bytes", &Save::staging_bytes)
      .def("stage", &Save::stage, "memory"_a, "bytes"_a, "Copies what this rank will write to an address.")
      .def("write", &Save::write);
  nb::class_<Checkpoint>(m, "Checkpoint",
                         "What a file or a directory holds, and reading it; it stays what it was when it was opened.")
      .def_static("open", nb::overload_cast<const base::Path&>(&Checkpoint::open), "path"_a,
                  nb::call_guard<nb::gil_scoped_release>(), "Of this process alone.")
      .def_static(
          "open_files", nb::overload_cast<const base::Path&, const std::vector<std::string>&>(&Checkpoint::open_files),
          "directory"_a, "names"_a, nb::call_guard<nb::gil_scoped_release>(), "Of one directory, that belong together.")
      .def_prop_ro("tensors", &tensors_in, "{name: (dtype, shape)}")
      .def_prop_ro("metadata", &Checkpoint::metadata, "of the first file")
      .def("read", nb::overload_cast<const TensorView&>(&Checkpoint::read, nb::const_), "view"_a,
           nb::call_guard<nb::gil_scoped_release>(), "Fills a view from the tensor of its name.");
  m.def("load_files", &load_files, "group"_a, "steps"_a, "verify"_a = true, "check_only"_a = false, "timeout"_a = 600.0,
        "progress"_a = nb::none(),
        "A load of one or several files by the methods of `steps`: LoadCall in src/file/load.h. look() -> what ranks "
        "compare, a list; find() -> (path, names, words), on rank 0; choose(words, [Checkpoint]) -> [(tensors, "
        "strict)]; begin(reports); "
        "end(). What one raises on one rank is raised on all. Returns reports by file. Collective.");
  m.def("open_checkpoints", &open_checkpoints, "group"_a, "steps"_a, "timeout"_a,
        "Opens what all ranks find alike, by the methods of `steps`: look() -> what ranks compare, a list; find() -> "
        "paths, on rank 0; opened([Checkpoint]), again where one was replaced meanwhile. What one raises on one rank "
        "is raised on all. "
        "Collective.");
  m.def(
      "while_locked", &while_locked, "path"_a, "work"_a,
      "Calls work(), while no save to a path begins. Raises DeadlineError where a living save holds the path, IoError "
      "where the lock's file cannot be made.");
  m.def("clear_dead_saves", &file::clear_dead, "path"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Removes what saves to a path left whose processes died; raises nothing.");
  m.def(
      "crc32",
      [](uintptr_t memory, int64_t bytes) {
        const nb::gil_scoped_release release;
        return file::crc32(0, {reinterpret_cast<const std::byte*>(memory), static_cast<size_t>(bytes)});
      },
      "memory"_a, "bytes"_a, "CRC-32, of zlib's polynomial, of memory at an address.");
}

}  // namespace shardow::python

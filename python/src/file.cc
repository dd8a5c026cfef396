// Saving and loading; the engine's threads of control wait for other ranks without the GIL.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
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
#include "file/crc.h"
#include "file/header.h"
#include "file/load.h"
#include "file/path_lock.h"
#include "file/staging.h"
#include "file_options.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

nb::dict as_dict(const SaveReport& report) {
  nb::dict result;
  nb::list files;
  for (const auto& file : report.files) files.append(nb::str(nb::cast(file)));
  result["files"] = files;
  result["bytes_written"] = report.bytes_written;
  result["seconds"] = report.seconds;
  return result;
}

/// StagedSave and what it refers to: the group, and who is told of progress.
class Save {
 public:
  Save(nb::object group, const std::vector<SaveFile>& files, const base::Path& path,
       const std::optional<std::string>& dtype, int64_t max_shard_size, const Strings& metadata, bool checksums,
       double timeout, nb::object progress, const Strings& texts, const std::string& commit)
      : group_(std::move(group)), told_(std::move(progress)) {
    auto options = writing<SaveOptions>(dtype, max_shard_size, metadata, timeout, callbacks_.progress(told_));
    options.texts = texts;
    options.commit = commit;
    options.checksums = checksums;
    Group& ranks = nb::cast<Group&>(group_);
    const nb::gil_scoped_release release;
    save_ = std::make_unique<StagedSave>(ranks, files, path, options);
  }

  size_t staging_bytes() const { return save_->staging_bytes(); }

  void stage(uintptr_t memory, int64_t bytes) {
    const nb::gil_scoped_release release;
    save_->stage({reinterpret_cast<std::byte*>(memory), static_cast<size_t>(bytes)});
  }

  nb::dict write() {
    SaveReport report;
    callbacks_.run([&] { report = save_->write(); });
    return as_dict(report);
  }

 private:
  nb::object group_, told_;
  Callbacks callbacks_;
  std::unique_ptr<StagedSave> save_;
};

/// A PathLock that Python ends.
class LockedPath {
 public:
  explicit LockedPath(const base::Path& path) : lock_(std::make_unique<file::PathLock>(path, file::Until())) {}
  void close() { lock_.reset(); }

 private:
  std::unique_ptr<file::PathLock> lock_;
};

nb::dict load_python(Group& group, const std::vector<TensorView>& tensors, const Checkpoint& checkpoint, bool strict,
                     bool verify, bool check_only, double timeout, const nb::object& progress) {
  Callbacks callbacks;
  const LoadOptions options = reading(strict, verify, check_only, timeout, callbacks.progress(progress));
  LoadReport report;
  callbacks.run([&] { report = file::load_from(group, tensors, file::Inside::of(checkpoint), options); });
  return dict_of(report);
}

nb::dict load_chosen(Group& group, const base::Path& path, const nb::callable& choose, bool verify, bool check_only,
                     double timeout, const nb::object& progress) {
  Callbacks callbacks;
  const LoadOptions options = reading(true, verify, check_only, timeout, callbacks.progress(progress));
  const auto chosen = [&](const std::shared_ptr<const file::Catalog>& catalog) {
    return callbacks.call("", [&] {
      auto [views, strict] =
          nb::cast<std::pair<std::vector<TensorView>, bool>>(choose(nb::cast(file::Inside::make(catalog))));
      return file::Chosen{std::move(views), strict};
    });
  };
  LoadReport report;
  callbacks.run([&] { report = file::load_chosen(group, path, chosen, options); });
  return dict_of(report);
}

nb::dict tensors_in(const Checkpoint& checkpoint) {
  nb::dict tensors;
  std::map<std::pair<DType, Shape>, nb::object> known;  // one object for all that are alike
  const file::Entry* last = nullptr;
  nb::object* described = nullptr;
  for (const file::Stored& stored : file::Inside::of(checkpoint).tensors) {
    const file::Entry& entry = stored.entry;
    if (last == nullptr || last->dtype != entry.dtype || last->shape != entry.shape) {
      described = &known[{entry.dtype, entry.shape}];
      if (!described->is_valid())
        *described = nb::make_tuple(std::string(dtype_name(entry.dtype)), nb::tuple(nb::cast(entry.shape)));
      last = &entry;
    }
    tensors[nb::cast(entry.name)] = *described;
  }
  return tensors;
}

}  // namespace

void bind_file(nb::module_& m) {
  nb::class_<SaveFile>(
      m, "SaveFile",
      "One of the files that a save makes: its name (empty: named as Hugging Face does), tensors and metadata.")
      .def(nb::init<std::string, std::vector<TensorView>, Strings>(), "name"_a, "tensors"_a, "metadata"_a = Strings());
  nb::class_<Save>(
      m, "Save",
      "A save in steps; see StagedSave in include/shardow/checkpoint.h. Making it is collective, and so is write().")
      .def(nb::init<nb::object, const std::vector<SaveFile>&, const base::Path&, const std::optional<std::string>&,
                    int64_t, const Strings&, bool, double, nb::object, const Strings&, const std::string&>(),
           "group"_a, "files"_a, "path"_a, "dtype"_a = nb::none(), "max_shard_size"_a = 0, "metadata"_a = Strings(),
           "checksums"_a = true, "timeout"_a = 600.0, "progress"_a = nb::none(), "texts"_a = Strings(), "commit"_a = "")
      .def_prop_ro("staging_bytes", &Save::staging_bytes)
      .def("stage", &Save::stage, "memory"_a, "bytes"_a, "Copies what this rank will write to an address.")
      .def("write", &Save::write);
  nb::class_<Checkpoint>(m, "Checkpoint",
                         "What a file or a directory holds, and reading it; it stays what it was when it was opened.")
      .def_static("open", nb::overload_cast<const base::Path&>(&Checkpoint::open), "path"_a,
                  nb::call_guard<nb::gil_scoped_release>(), "Of this process alone.")
      .def_static(
          "open",
          [](Group& group, const base::Path& path, double timeout) {
            return Checkpoint::open(group, path, milliseconds(timeout));
          },
          "group"_a, "path"_a, "timeout"_a, nb::call_guard<nb::gil_scoped_release>(), "Collective.")
      .def_static(
          "open_files", nb::overload_cast<const base::Path&, const std::vector<std::string>&>(&Checkpoint::open_files),
          "directory"_a, "names"_a, nb::call_guard<nb::gil_scoped_release>(), "Of one directory, that belong together.")
      .def_static(
          "open_files",
          [](Group& group, const base::Path& directory, const std::vector<std::string>& names, double timeout) {
            return Checkpoint::open_files(group, directory, names, milliseconds(timeout));
          },
          "group"_a, "directory"_a, "names"_a, "timeout"_a, nb::call_guard<nb::gil_scoped_release>(), "Collective.")
      .def_prop_ro("tensors", &tensors_in, "{name: (dtype, shape)}")
      .def_prop_ro("metadata", &Checkpoint::metadata, "of the first file")
      .def("read", nb::overload_cast<const TensorView&>(&Checkpoint::read, nb::const_), "view"_a,
           nb::call_guard<nb::gil_scoped_release>(), "Fills a view from the tensor of its name.");
  m.def("load", &load_python, "group"_a, "tensors"_a, "checkpoint"_a, "strict"_a = true, "verify"_a = true,
        "check_only"_a = false, "timeout"_a = 600.0, "progress"_a = nb::none(),
        "Collective; see include/shardow/checkpoint.h.");
  m.def("load_chosen", &load_chosen, "group"_a, "path"_a, "choose"_a, "verify"_a = true, "check_only"_a = false,
        "timeout"_a = 600.0, "progress"_a = nb::none(),
        "load() from a path. choose(checkpoint) -> (tensors, strict), on every rank; what it raises is raised on all. "
        "Collective.");
  nb::class_<LockedPath>(m, "LockedPath", "While it is held, no save to a path begins.")
      .def(nb::init<base::Path>(), "path"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Raises DeadlineError where a living save holds the path, IoError where the lock's file cannot be made.")
      .def("close", &LockedPath::close, nb::call_guard<nb::gil_scoped_release>());
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

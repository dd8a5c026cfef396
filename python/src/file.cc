// Saving and loading; the engine's threads of control wait for other ranks without the GIL.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "core.h"
#include "file/catalog.h"
#include "file/header.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

using Strings = std::map<std::string, std::string>;

std::chrono::seconds whole_seconds(double seconds) {
  return std::chrono::seconds(static_cast<int64_t>(seconds < 1 ? 1 : seconds));
}

ProgressFn in_python(const nb::object& progress) {
  if (progress.is_none()) return {};
  return [&progress](int64_t done, int64_t total) {
    nb::gil_scoped_acquire gil;
    progress(done, total);
  };
}

nb::dict save_python(Group& group, const std::vector<TensorView>& tensors, const std::string& path, const std::optional<std::string>& dtype,
                     int64_t max_shard_size, const Strings& metadata, bool checksums, double timeout, const nb::object& progress) {
  SaveOptions options;
  if (dtype) options.dtype = dtype_from_name(*dtype);
  options.max_shard_size = max_shard_size;
  options.metadata = metadata;
  options.checksums = checksums;
  options.timeout = whole_seconds(timeout);
  options.progress = in_python(progress);
  SaveReport report;
  {
    nb::gil_scoped_release release;
    report = save(group, tensors, path, options);
  }
  nb::dict result;
  nb::list files;
  for (const auto& file : report.files) files.append(file.string());
  result["files"] = files;
  result["bytes_written"] = report.bytes_written;
  result["seconds"] = report.seconds;
  return result;
}

nb::dict load_python(Group& group, const std::vector<TensorView>& tensors, const std::string& path, bool strict, bool verify,
                     bool check_only, double timeout, const nb::object& progress) {
  LoadOptions options;
  options.strict = strict;
  options.verify = verify;
  options.check_only = check_only;
  options.timeout = whole_seconds(timeout);
  options.progress = in_python(progress);
  LoadReport report;
  {
    nb::gil_scoped_release release;
    report = load(group, tensors, path, options);
  }
  nb::dict result;
  result["missing"] = report.missing;
  result["unexpected"] = report.unexpected;
  result["metadata"] = report.metadata;
  result["bytes_read"] = report.bytes_read;
  result["seconds"] = report.seconds;
  return result;
}

nb::list entries_of(const std::vector<file::Entry>& entries) {
  nb::list result;
  for (const file::Entry& entry : entries)
    result.append(nb::make_tuple(entry.name, std::string(dtype_name(entry.dtype)), entry.shape, entry.begin, entry.end));
  return result;
}

}  // namespace

void bind_file(nb::module_& m) {
  m.def("save", &save_python, "group"_a, "tensors"_a, "path"_a, "dtype"_a = nb::none(), "max_shard_size"_a = 0, "metadata"_a = Strings(),
        "checksums"_a = true, "timeout"_a = 600.0, "progress"_a = nb::none(), "Collective; see include/shardow/checkpoint.h.");
  m.def("load", &load_python, "group"_a, "tensors"_a, "path"_a, "strict"_a = true, "verify"_a = true, "check_only"_a = false,
        "timeout"_a = 600.0, "progress"_a = nb::none(), "Collective; see include/shardow/checkpoint.h.");
  m.def(
      "read_catalog",
      [](Group& group, const std::string& path, double timeout) {
        file::Catalog catalog;
        {
          nb::gil_scoped_release release;
          catalog = file::share_catalog(group, path, whole_seconds(timeout));
        }
        nb::dict tensors;
        for (const auto& [name, stored] : catalog.tensors) {
          tensors[nb::cast(name)] = nb::make_tuple(std::string(dtype_name(stored.entry.dtype)), nb::tuple(nb::cast(stored.entry.shape)));
        }
        return nb::make_tuple(tensors, catalog.metadata);
      },
      "group"_a, "path"_a, "timeout"_a = 600.0, "({name: (dtype, shape)}, metadata) of a file or a directory. Collective.");
  m.def(
      "parse_header",
      [](const nb::bytes& json, int64_t data_bytes) {
        const file::Header header = file::parse_header(std::string_view(json.c_str(), json.size()), data_bytes, "header");
        return nb::make_tuple(entries_of(header.entries), header.metadata);
      },
      "json"_a, "data_bytes"_a,
      "([(name, dtype, shape, begin, end)], metadata) of a safetensors header; raises ValueError for what breaks a rule.");
}

}  // namespace shardow::python

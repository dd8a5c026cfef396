// What the calls that read and write files take and give alike.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "callbacks.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow::python {

using Strings = std::map<std::string, std::string>;

/// SaveOptions, MergeOptions: what they have in common.
template <class Options>
Options writing(const std::optional<std::string>& dtype, int64_t max_shard_size, const Strings& metadata,
                double timeout, ProgressFn progress) {
  return {.dtype = dtype ? std::optional(dtype_from_name(*dtype)) : std::nullopt,
          .max_shard_size = max_shard_size,
          .metadata = metadata,
          .timeout = milliseconds(timeout),
          .progress = std::move(progress)};
}

inline LoadOptions reading(bool strict, bool verify, bool check_only, double timeout, ProgressFn progress) {
  return {.strict = strict,
          .verify = verify,
          .check_only = check_only,
          .timeout = milliseconds(timeout),
          .progress = std::move(progress)};
}

/// A path as os.fsdecode() has it.
inline nanobind::str decoded(const std::filesystem::path& path) {
  return nanobind::str(nanobind::cast(path));
}

/// SaveReport, MergeReport: what they have in common.
template <class Report>
nanobind::dict written(const Report& report) {
  nanobind::dict result;
  result["files"] = list_of(report.files, decoded);
  result["bytes_written"] = report.bytes_written;
  result["seconds"] = report.seconds;
  return result;
}

inline nanobind::dict dict_of(const LoadReport& report) {
  nanobind::dict result;
  result["missing"] = report.missing;
  result["unexpected"] = report.unexpected;
  result["metadata"] = report.metadata;
  result["bytes_read"] = report.bytes_read;
  result["seconds"] = report.seconds;
  return result;
}

}  // namespace shardow::python

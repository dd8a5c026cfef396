// Shows what a checkpoint holds, from its headers alone; with --values from all of its numbers.
#include <algorithm>
#include <map>
#include <set>

#include "average/clock.h"
#include "cli/app.h"
#include "cli/lanes.h"
#include "cli/numbers.h"
#include "cli/sources.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "ema/names.h"
#include "file/catalog.h"
#include "shardow/error.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

struct InspectOptions {
  std::vector<std::string> paths;
  bool json = false, tree = false, full = false, values = false;
};

using Values = std::map<std::string, Extremes>;  ///< by name; of tensors that have numbers

/// Reads all tensors, several at once.
Values values_of(const Checkpoint& checkpoint) {
  const file::Catalog& catalog = file::Inside::of(checkpoint);
  std::vector<std::pair<const file::Stored*, Extremes*>> jobs;
  Values values;
  int64_t total = 0;
  for (const file::Stored& stored : catalog.tensors) {
    if (!has_values(stored.entry.dtype)) continue;
    jobs.emplace_back(&stored, &values[stored.entry.name]);
    total += stored.entry.end - stored.entry.begin;
  }
  ProgressLine line("inspect");
  std::atomic<int64_t> done{0};
  in_lanes(static_cast<int64_t>(jobs.size()), kLanes, [&](int64_t job, int lane) {
    const auto& [stored, extremes] = jobs[static_cast<size_t>(job)];
    *extremes = extremes_of(catalog, *stored);
    done += stored->entry.end - stored->entry.begin;
    if (lane == 0) line.tell(done, total);
  });
  return values;
}

struct Totals {
  int64_t tensors = 0, elements = 0, bytes = 0;
  std::map<std::string, int64_t> dtypes;  ///< tensors by dtype

  void add(const StoredTensor& tensor) {
    ++tensors;
    elements += Region::whole(tensor.shape).size();
    bytes += tensor.bytes;
    ++dtypes[std::string(dtype_name(tensor.dtype))];
  }
};

/// Of an EMA's file; nothing for another's text under our key.
std::optional<average::Clock> state_in(const std::map<std::string, std::string>& metadata) {
  const auto found = metadata.find(kStateKey);
  if (found == metadata.end()) return std::nullopt;
  try {
    return average::clock_from_json(found->second);
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// Our versions say so in each file; the first ones are known by the keys of their metadata. Others' tools say "format"
/// at most.
std::string writer_of(const Source& source) {
  std::set<std::string> versions;
  for (const auto& file : file::Inside::of(source.checkpoint).files) versions.insert(file.version);
  if (versions.size() == 1 && !versions.begin()->empty()) return "shardow " + *versions.begin();
  const auto& metadata = source.checkpoint.metadata();
  const bool ours =
      std::any_of(metadata.begin(), metadata.end(), [](const auto& one) { return one.first.starts_with("shardow."); });
  const std::vector<std::string> names = source.checkpoint.names();
  const bool sums =
      std::any_of(names.begin(), names.end(), [&](const auto& name) { return source.checkpoint.tensor(name).crc32; });
  if (ours || sums) return versions.size() > 1 ? "several versions of shardow" : "shardow";
  return metadata.contains("format") ? "unknown, of format " + metadata.at("format") : "unknown";
}

void print_state(const average::Clock& state) {
  const auto& [counters, options] = state;
  print("  EMA: step {}, {} updates, {} averages, seed {}", counters.step, counters.updates, dtype_name(options.dtype),
        options.seed);
  if (options.update_every > 1) print(", every {} steps", options.update_every);
  if (options.start_step > 0) print(", from step {}", options.start_step);
  put("\n");
  for (const Schedule& schedule : options.schedules) print("    schedule {}\n", shown(schedule.to_json()));
}

void print_metadata(const Source& source, bool full) {
  constexpr size_t kMost = 100;
  for (const auto& [key, value] : source.checkpoint.metadata()) {
    const std::string text = full ? value : value.substr(0, kMost);
    print("  {}: {}{}\n", shown(key), shown(text),
          text.size() < value.size() ? fmt::format("... ({} bytes)", value.size()) : "");
  }
}

using Row = std::vector<std::string>;

/// The last columns are numbers, on the right.
void print_table(const std::vector<Row>& rows) {
  constexpr size_t kTexts = 3;
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const Row& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const Row& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      if (c > 0) line += "  ";
      line += c < kTexts ? fmt::format("{:{}}", row[c], widths[c])
                         : fmt::format("{:>{}}", row[c], std::max<size_t>(widths[c], c == kTexts ? 10 : 0));
    }
    print("{}\n", &row == rows.data() ? coloured(Colour::kBold, line) : line);
  }
}

/// Least, most, NaN, infinite; "-" for what there is not.
Row columns_of(const Values& values, const std::string& name) {
  const auto entry = values.find(name);
  if (entry == values.end()) return {"-", "-", "-", "-"};
  const Extremes& extremes = entry->second;
  const bool finite = extremes.has_finite();
  const auto shown_number = [&](long double number) { return finite ? fmt::format("{:.6g}", number) : "-"; };
  return {shown_number(extremes.least), shown_number(extremes.most), std::to_string(extremes.nan),
          std::to_string(extremes.infinite)};
}

/// Names are paths of words with dots between them: each word once, with what lies below it.
void print_tree(const Checkpoint& checkpoint, const std::vector<std::string>& names, size_t begin, size_t end,
                size_t depth, size_t from) {
  while (begin < end) {
    const std::string& name = names[begin];
    const size_t dot = name.find('.', from);
    const std::string_view stem = std::string_view(name).substr(0, dot == std::string::npos ? name.size() : dot + 1);
    size_t next = begin + 1;
    if (dot == std::string::npos) {
      const StoredTensor tensor = checkpoint.tensor(name);
      print("{:{}}{}  {} {}  {}\n", "", 2 * depth, shown(std::string_view(name).substr(from)), dtype_name(tensor.dtype),
            shown_shape(tensor.shape), shown_bytes(tensor.bytes));
    } else {
      while (next < end && std::string_view(names[next]).starts_with(stem)) ++next;
      Totals totals;
      for (size_t i = begin; i < next; ++i) totals.add(checkpoint.tensor(names[i]));
      const std::string word = shown(stem.substr(from, dot - from));
      print(
          "{:{}}{}  {}\n", "", 2 * depth, coloured(Colour::kBold, word),
          coloured(Colour::kDim, fmt::format("{}, {}", counted(totals.tensors, "tensor"), shown_bytes(totals.bytes))));
      print_tree(checkpoint, names, begin, next, depth + 1, dot + 1);
    }
    begin = next;
  }
}

void print_text(const Source& source, const std::string& asked, const InspectOptions& options) {
  const Checkpoint& checkpoint = source.checkpoint;
  const std::vector<std::string> names = checkpoint.names();
  Totals totals;
  for (const std::string& name : names) totals.add(checkpoint.tensor(name));
  const std::filesystem::path path = std::filesystem::path(asked) / source.label;
  print("{}\n", coloured(Colour::kBold, shown((source.label.empty() ? std::filesystem::path(asked) : path).string())));
  std::string dtypes;
  for (const auto& [dtype, count] : totals.dtypes) dtypes += fmt::format(", {} {}", count, dtype);
  print("  {}{}; {}, {}, {}\n", counted(totals.tensors, "tensor"), dtypes.empty() ? "" : " (" + dtypes.substr(2) + ")",
        counted(totals.elements, "element"), shown_bytes(totals.bytes), counted(checkpoint.files().size(), "file"));
  print("  written by: {}\n", shown(writer_of(source)));
  if (const auto state = state_in(checkpoint.metadata())) print_state(*state);
  print_metadata(source, options.full);
  put("\n");
  if (options.tree) {
    print_tree(checkpoint, names, 0, names.size(), 0, 0);
  } else {
    const Values values = options.values ? values_of(checkpoint) : Values();
    std::vector<Row> rows = {{"NAME", "DTYPE", "SHAPE", "SIZE"}};
    if (options.values) rows[0].insert(rows[0].end(), {"MIN", "MAX", "NAN", "INF"});
    for (const std::string& name : names) {
      const StoredTensor tensor = checkpoint.tensor(name);
      Row& row = rows.emplace_back(Row{shown(name), std::string(dtype_name(tensor.dtype)), shown_shape(tensor.shape),
                                       shown_bytes(tensor.bytes)});
      if (!options.values) continue;
      const Row columns = columns_of(values, name);
      row.insert(row.end(), columns.begin(), columns.end());
    }
    print_table(rows);
  }
}

Json as_json(const Values& values, const std::string& name) {
  const auto entry = values.find(name);
  if (entry == values.end()) return nullptr;
  const Extremes& extremes = entry->second;
  const auto finite = [&](long double number) -> Json {
    if (!extremes.has_finite()) return nullptr;
    return static_cast<double>(number);
  };
  return Json::object({{"min", finite(extremes.least)},
                       {"max", finite(extremes.most)},
                       {"nan", extremes.nan},
                       {"infinite", extremes.infinite}});
}

Json tensors_of(const Checkpoint& checkpoint, bool with_values) {
  const Values values = with_values ? values_of(checkpoint) : Values();
  return Json::list(checkpoint.names(), [&](const std::string& name) {
    const StoredTensor tensor = checkpoint.tensor(name);
    Json::Fields fields{{"name", name},          {"dtype", dtype_name(tensor.dtype)},
                        {"shape", tensor.shape}, {"bytes", tensor.bytes},
                        {"file", tensor.file},   {"crc32", nullptr}};
    if (tensor.crc32) fields.back().second = fmt::format("{:08x}", *tensor.crc32);
    if (with_values) fields.emplace_back("values", as_json(values, name));
    return Json::object(fields);
  });
}

Json as_json(const average::Clock& state) {
  const auto json_of = [](const Schedule& schedule) { return Json::raw(schedule.to_json()); };
  return Json::object({{"step", state.counters.step},
                       {"updates", state.counters.updates},
                       {"schedules", Json::list(state.options.schedules, json_of)}});
}

Json as_json(const Source& source, const std::string& path, bool with_values) {
  const auto& metadata = source.checkpoint.metadata();
  const auto state = state_in(metadata);
  const auto path_of = [](const StoredFile& file) { return Json(file.path); };
  return Json::object({{"path", path},
                       {"name", source.label},
                       {"written_by", writer_of(source)},
                       {"files", Json::list(source.checkpoint.files(), path_of)},
                       {"metadata", Json::object(Json::Fields(metadata.begin(), metadata.end()))},
                       {"ema", state ? as_json(*state) : nullptr},
                       {"tensors", tensors_of(source.checkpoint, with_values)}});
}

int inspect(const InspectOptions& options) {
  std::vector<Json> checkpoints;
  const char* between = "";
  for (const std::string& path : options.paths) {
    for (const Source& source : open_sources(path)) {
      if (options.json) {
        checkpoints.push_back(as_json(source, path, options.values));
        continue;
      }
      put(std::exchange(between, "\n"));
      print_text(source, path, options);
    }
  }
  if (!options.json) return 0;
  Json::Fields fields;
  if (options.paths.size() == 1) fields.emplace_back("path", options.paths[0]);
  fields.emplace_back("checkpoints", checkpoints);
  put_json(Json::object(fields));
  return 0;
}

}  // namespace

void add_inspect(CLI::App& app, Action& chosen) {
  std::shared_ptr<InspectOptions> options;
  CLI::App& verb =
      add_verb(app, chosen, "inspect",
               "Show what a checkpoint holds: names, dtypes, shapes, sizes, metadata, an EMA's schedules and step",
               inspect, options);
  verb.add_option("PATH", options->paths, "files or directories")->required();
  verb.add_flag("--tree", options->tree, "names as a tree, with the sizes of its branches, in place of a table");
  verb.add_flag("--values", options->values,
                "least and largest number of each tensor, how many are NaN and infinite: reads all of it")
      ->excludes("--tree");
  verb.add_flag("--full", options->full, "texts of the metadata in full");
  add_json(verb, options->json);
  add_examples(verb,
               {{"What is in it", "shardow inspect run/ema.safetensors"},
                {"Where the bytes are", "shardow inspect --tree model | less"},
                {"Which tensors have numbers that are not finite", "shardow inspect --values run/ema.safetensors"},
                {"The step of an EMA", "shardow inspect --json run/ema.safetensors | jq '.checkpoints[0].ema.step'"}});
}

}  // namespace shardow::cli

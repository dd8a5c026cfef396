// How two checkpoints differ.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/errors.h"
#include "cli/app.h"
#include "cli/exit_status.h"
#include "cli/lanes.h"
#include "cli/numbers.h"
#include "cli/sources.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "file/catalog.h"
#include "file/layout.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

struct DiffOptions {
  std::string a, b;
  int64_t worst = 10;
  int threads = 0;
  bool json = false;
};

/// How far the numbers of two tensors are apart. The sums are long double: its range has room for squares of every
/// float64, and its 64 bits for every I64 and U64.
struct Deviation {
  bool equal_bytes = true;
  int64_t elements = 0;    ///< numbers: a C64 has two
  int64_t differing = 0;   ///< numbers of another value; NaN equals NaN, 0 equals -0
  int64_t not_finite = 0;  ///< of these, where a, b or a - b is NaN or infinite in float64; the sums leave them out
  double most = 0;         ///< max |a - b|
  long double squares = 0, squares_a = 0;  ///< of a - b, and of a

  double rms() const noexcept {
    const int64_t counted = elements - not_finite;
    return counted == 0 ? 0 : static_cast<double>(std::sqrt(squares / static_cast<long double>(counted)));
  }

  /// |a - b| / |a|, in norms; infinite where a is 0 and b is not.
  double relative() const noexcept {
    if (squares == 0) return 0;
    return static_cast<double>(std::sqrt(squares / squares_a));  // infinite where a is 0
  }
};

/// A tensor on one side.
struct Place {
  const file::Catalog* catalog;
  const file::Stored* stored;

  const file::Entry& entry() const noexcept { return stored->entry; }
  int64_t bytes() const noexcept { return entry().end - entry().begin; }
  file::Opened& file() const { return *catalog->files[stored->file].file; }
};

/// A tensor that both have.
struct Pair {
  std::string name;
  Place a, b;
  bool read = false;  ///< the same shape, and numbers or at least bytes that can be compared
  Deviation deviation = {};

  bool differs() const noexcept { return !read || a.entry().dtype != b.entry().dtype || !deviation.equal_bytes; }
};

struct Comparison {
  std::vector<std::string> only_a, only_b;  ///< ascending
  std::vector<Pair> pairs;                  ///< ascending by name

  bool differs() const noexcept {
    return !only_a.empty() || !only_b.empty() ||
           std::any_of(pairs.begin(), pairs.end(), [](const Pair& pair) { return pair.differs(); });
  }
};

std::map<std::string, Place> places(const std::vector<Source>& sources, bool with_labels) {
  std::map<std::string, Place> all;
  for (const Source& source : sources) {
    const file::Catalog& catalog = file::Inside::of(source.checkpoint);
    for (const file::Stored& stored : catalog.tensors)
      all.emplace(with_labels ? full_name(source, stored.entry.name) : stored.entry.name, Place{&catalog, &stored});
  }
  return all;
}

/// Whether tensors of several of them have one name, so that files have to be told apart.
bool are_ambiguous(const std::vector<Source>& sources) {
  size_t count = 0;
  for (const Source& source : sources) count += file::Inside::of(source.checkpoint).tensors.size();
  return places(sources, false).size() < count;
}

bool has_a_model(const std::vector<Source>& sources) {
  return std::any_of(sources.begin(), sources.end(), [](const Source& one) { return one.label.empty(); });
}

/// A model in one of them has the plain names; without, tensors of files beside one another cannot be told from the
/// other side's.
void check_one_is_meant(const std::vector<Source>& sources) {
  if (has_a_model(sources)) return;
  std::vector<std::string> labels;
  labels.reserve(sources.size());
  for (const Source& source : sources) labels.push_back(source.label);
  base::fail(Code::kInvalidArgument, "{} has {} files with the same names of tensors in them, {}; name one of them",
             sources[0].checkpoint.files()[0].path.parent_path().string(), labels.size(), fmt::join(labels, ", "));
}

bool can_read(const file::Entry& a, const file::Entry& b) {
  if (a.shape != b.shape) return false;
  return a.dtype == b.dtype ||
         (has_values(a.dtype) && has_values(b.dtype) && a.dtype != DType::kC64 && b.dtype != DType::kC64);
}

void add_number(Deviation& sums, long double a, long double b) noexcept {
  if (std::isfinite(a)) sums.squares_a += a * a;
  if (a == b || (std::isnan(a) && std::isnan(b))) return;
  ++sums.differing;
  const long double apart = std::fabs(a - b);
  if (const auto rounded = static_cast<double>(apart); std::isfinite(rounded)) {
    sums.most = std::max(sums.most, rounded);
    sums.squares += apart * apart;
  } else {
    ++sums.not_finite;
  }
}

/// What one thread has of a pair: a chunk of each side.
struct Chunks {
  Pair& pair;
  std::vector<std::byte> a = {}, b = {};

  /// Calls work(count) for one chunk after the other, until it returns false.
  template <class Work>
  void for_each(const Work& work) {
    const int64_t size = Region::whole(pair.a.entry().shape).size();
    for (int64_t begin = 0; begin < size; begin += kMostElements) {
      check_interrupted();
      const int64_t end = std::min(begin + kMostElements, size);
      read_elements(*pair.a.catalog, *pair.a.stored, begin, end, a);
      read_elements(*pair.b.catalog, *pair.b.stored, begin, end, b);
      if (!work(end - begin)) return;
    }
  }

  void add_numbers(int64_t count) {
    const DType dtype_a = pair.a.entry().dtype, dtype_b = pair.b.entry().dtype;
    const int64_t parts = dtype_a == DType::kC64 ? 2 : 1;
    std::array<long double, kMostNumbers> x, y;
    for (int64_t begin = 0; begin < count; begin += kMostNumbers / parts) {
      const int64_t size = std::min(kMostNumbers / parts, count - begin);
      to_numbers(a.data() + begin * dtype_bits(dtype_a) / 8, dtype_a, x.data(), size);
      to_numbers(b.data() + begin * dtype_bits(dtype_b) / 8, dtype_b, y.data(), size);
      for (size_t i = 0; i < static_cast<size_t>(size * parts); ++i) add_number(pair.deviation, x[i], y[i]);
    }
  }
};

/// Compares bytes up to the first difference, then all numbers from the beginning where there is one. Calls told() with
/// the bytes that are done.
template <class Told>
void compare_pair(Pair& pair, const Told& told) {
  const file::Entry &a = pair.a.entry(), &b = pair.b.entry();
  Chunks chunks{pair};
  int64_t done = 0, passed = 0;
  const auto advance = [&](int64_t count) {
    passed += count;
    if (passed <= done) return;
    told(file::bytes_of(passed - done, a) + file::bytes_of(passed - done, b));
    done = passed;
  };
  bool& equal = pair.deviation.equal_bytes;
  equal = a.dtype == b.dtype;
  chunks.for_each([&](int64_t count) {
    equal = equal && chunks.a == chunks.b;
    if (equal) advance(count);
    return equal;
  });
  const int64_t size = Region::whole(a.shape).size();
  if (has_values(a.dtype)) pair.deviation.elements = a.dtype == DType::kC64 ? 2 * size : size;
  passed = 0;
  if (!equal && has_values(a.dtype)) {
    chunks.for_each([&](int64_t count) {
      chunks.add_numbers(count);
      advance(count);
      return true;
    });
  }
  pair.a.file().check_unchanged();
  pair.b.file().check_unchanged();
}

/// What can be told from headers. Tensors are compared by name, whatever their files are called; where several files of
/// a side have the same names, by file and name. Throws kInvalidArgument where that is so of one side alone. Borrows
/// the sources.
Comparison compare_names(const std::vector<Source>& a, const std::vector<Source>& b) {
  const bool unsure_a = are_ambiguous(a), unsure_b = are_ambiguous(b);
  if (unsure_a != unsure_b) check_one_is_meant(unsure_a ? a : b);
  const bool both = (unsure_a || unsure_b) && has_a_model(a) &&
                    has_a_model(b);  // what lies beside their models has its file's name, too
  const std::map<std::string, Place> in_a = places(a, unsure_a || both), in_b = places(b, unsure_b || both);
  Comparison found;
  for (const auto& [name, place] : in_a) {
    const auto other = in_b.find(name);
    if (other == in_b.end()) {
      found.only_a.push_back(name);
      continue;
    }
    found.pairs.push_back({name, place, other->second, can_read(place.entry(), other->second.entry())});
  }
  for (const auto& [name, place] : in_b) {
    if (!in_a.contains(name)) found.only_b.push_back(name);
  }
  return found;
}

/// Reads both, chunk by chunk, and fills in the deviations. `lanes` threads compare a tensor each; results do not
/// depend on how many there are.
void compare_values(Comparison& comparison, int lanes, const std::function<void(int64_t done, int64_t total)>& told) {
  std::vector<Pair*> pairs;
  int64_t total = 0;
  for (Pair& pair : comparison.pairs) {
    if (!pair.read) continue;
    pairs.push_back(&pair);
    total += pair.a.bytes() + pair.b.bytes();
  }
  std::atomic<int64_t> done{0};
  const auto work = [&](int64_t number, int lane) {
    compare_pair(*pairs[static_cast<size_t>(number)], [&](int64_t bytes) {
      done += bytes;
      if (lane == 0) told(done, total);
    });
  };
  in_lanes(static_cast<int64_t>(pairs.size()), lanes, work);
}

/// Pairs that differ, the worst first: those without numbers, then by relative difference.
std::vector<const Pair*> by_difference(const Comparison& comparison) {
  std::vector<const Pair*> worst;
  for (const Pair& pair : comparison.pairs) {
    if (pair.differs()) worst.push_back(&pair);
  }
  const auto badness = [](const Pair& pair) {
    return std::tuple(pair.read ? 1 : 0, -pair.deviation.not_finite, -pair.deviation.relative());
  };
  std::stable_sort(worst.begin(), worst.end(), [&](const Pair* x, const Pair* y) { return badness(*x) < badness(*y); });
  return worst;
}

std::string what_differs(const Pair& pair) {
  const file::Entry &a = pair.a.entry(), &b = pair.b.entry();
  if (a.shape != b.shape) return fmt::format("shape {} and {}", shown_shape(a.shape), shown_shape(b.shape));
  std::string text;
  if (a.dtype != b.dtype) text = fmt::format("{} and {}", dtype_name(a.dtype), dtype_name(b.dtype));
  if (!pair.read) return text;
  const char* const comma = text.empty() ? "" : ", ";
  const Deviation& d = pair.deviation;
  if (!has_values(a.dtype)) return text + comma + (d.equal_bytes ? "" : "other bytes");
  if (d.differing == 0) return text + comma + "equal values";
  text += fmt::format("{}{} of {} numbers, max {:.3g}, rms {:.3g}, relative {:.3g}", comma, d.differing, d.elements,
                      d.most, d.rms(), d.relative());
  if (d.not_finite > 0) text += fmt::format(", {} not finite", d.not_finite);
  return text;
}

void print_text(const Comparison& comparison, const DiffOptions& options) {
  for (const std::string& name : comparison.only_a) print("only in {}: {}\n", shown(options.a), shown(name));
  for (const std::string& name : comparison.only_b) print("only in {}: {}\n", shown(options.b), shown(name));
  const std::vector<const Pair*> worst = by_difference(comparison);
  const size_t most = options.worst == 0 ? worst.size() : std::min(worst.size(), static_cast<size_t>(options.worst));
  for (size_t i = 0; i < most; ++i)
    print("{}: {}\n", coloured(Colour::kBold, shown(worst[i]->name)), what_differs(*worst[i]));
  if (most < worst.size()) print("... and {} more (--worst 0 shows all)\n", worst.size() - most);
  if (comparison.differs()) {
    print("{} of {} differ{}\n", worst.size(), counted(comparison.pairs.size(), "common tensor"),
          comparison.pairs.size() == 1 ? "s" : "");
  } else {
    print("{}, {}\n", coloured(Colour::kGood, "equal"), counted(comparison.pairs.size(), "tensor"));
  }
}

Json as_json(const Pair& pair) {
  const Deviation& d = pair.deviation;
  const file::Entry &a = pair.a.entry(), &b = pair.b.entry();
  Json values = nullptr;
  if (pair.read && has_values(a.dtype))
    values = Json::object({{"numbers", d.elements},
                           {"differing", d.differing},
                           {"not_finite", d.not_finite},
                           {"max", d.most},
                           {"rms", d.rms()},
                           {"relative", d.relative()}});
  return Json::object({{"name", pair.name},
                       {"differs", pair.differs()},
                       {"dtypes", std::vector{dtype_name(a.dtype), dtype_name(b.dtype)}},
                       {"shapes", std::vector{a.shape, b.shape}},
                       {"values", values}});
}

Json as_json(const Comparison& comparison) {
  return Json::object({{"equal", !comparison.differs()},
                       {"only_a", comparison.only_a},
                       {"only_b", comparison.only_b},
                       {"tensors", Json::list(comparison.pairs, [](const Pair& pair) { return as_json(pair); })}});
}

int diff(const DiffOptions& options) {
  const std::vector<Source> a = open_sources(options.a), b = open_sources(options.b);
  Comparison comparison = compare_names(a, b);
  {
    ProgressLine line("diff");
    compare_values(comparison, options.threads, [&](int64_t done, int64_t total) { line.tell(done, total); });
  }
  options.json ? put_json(as_json(comparison)) : print_text(comparison, options);
  return comparison.differs() ? kDifferent : 0;
}

}  // namespace

void add_diff(CLI::App& app, Action& chosen) {
  std::shared_ptr<DiffOptions> options;
  CLI::App& verb = add_verb(app, chosen, "diff",
                            "Compare two checkpoints: names, shapes, dtypes, and in float64 max |a - b|, rms of a - b, "
                            "and |a - b| / |a| of each tensor",
                            diff, options);
  verb.add_option("A", options->a, "file or directory")->required();
  verb.add_option("B", options->b, "file or directory, in whatever number of files")->required();
  verb.add_option("--worst", options->worst, "so many tensors that differ are shown, the worst first; 0: all")
      ->check([](const std::string& worst) {
        return worst.starts_with('-') ? worst + " is no number of tensors: give 0 for all of them, or more" : "";
      })
      ->capture_default_str()
      ->option_text("N");
  add_threads(verb, options->threads);
  add_json(verb, options->json);
  add_examples(verb,
               {{"Did the export change anything", "shardow diff run/ema.safetensors exported"},
                {"How far an average is from the weights",
                 "shardow diff run/step-000001000/model.safetensors run/step-000001000/ema-0.999.safetensors"},
                {"In a script: 0 equal, 1 different, more is trouble", "shardow diff --json A B > difference.json"}});
}

}  // namespace shardow::cli

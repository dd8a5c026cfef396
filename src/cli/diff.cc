// How two checkpoints differ.
#include <algorithm>
#include <cmath>

#include "cli/app.h"
#include "cli/comparison.h"
#include "cli/exit_status.h"
#include "cli/numbers.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "file/catalog.h"
#include "tensor/dtype.h"

namespace shardow::cli {
namespace {

struct DiffOptions {
  std::string a, b;
  int64_t worst = 10;
  int threads = 0;
  bool json = false;
};

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
  const auto &a = pair.a->entry, &b = pair.b->entry;
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
  const file::Entry &a = pair.a->entry, &b = pair.b->entry;
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

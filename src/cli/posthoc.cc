// Averages with a profile that is chosen after training: posthoc/posthoc.h from the command line.
#include "posthoc/posthoc.h"

#include <sstream>

#include "base/errors.h"
#include "cli/exit_status.h"
#include "cli/output.h"
#include "posthoc/snapshots.h"

namespace shardow::cli {
namespace {

struct PosthocOptions {
  std::string directory;
  bool sweep = false;
  std::optional<double> sigma_rel;
  std::optional<int64_t> step;
  OutputOptions output;
  int threads = 0;
};

int sweep(const PosthocOptions& options) {
  const posthoc::Sweep found = posthoc::sweep(options.directory, options.step, {}, check_interrupted);
  if (!options.output.json) {
    print("The error to expect at step {} of {}\n{:>9}  {:>8}  {:>8}\n", found.step,
          counted(found.snapshots, "snapshot"), "sigma_rel", "residual", "rounding");
    for (const auto& [sigma_rel, residual, rounding] : found.points)
      print("{:>9.3g}  {:>8.2e}  {:>8.2e}\n", sigma_rel, residual, rounding);
    return 0;
  }
  const auto point_of = [](const posthoc::SweepPoint& point) {
    return Json::object({{"sigma_rel", point.sigma_rel}, {"residual", point.residual}, {"rounding", point.rounding}});
  };
  put_json(Json::object(
      {{"step", found.step}, {"snapshots", found.snapshots}, {"points", Json::list(found.points, point_of)}}));
  return 0;
}

void print_plan(const posthoc::Plan& plan, const MergeReport& report, const OutputOptions& output) {
  std::istringstream lines(posthoc::describe(plan));  // one by one: paths in them are somebody's
  for (std::string line; std::getline(lines, line);) print("{}\n", shown(line));
  if (output.path.empty()) return;
  print_written(output, report.averaged.size() + report.taken.size(), report);
}

void print_json(const posthoc::Plan& plan, const MergeReport& report) {
  const auto term_of = [](const posthoc::Term& term) {
    return Json::object(
        {{"path", term.path}, {"key", term.key}, {"step", term.step}, {"coefficient", term.coefficient}});
  };
  put_json(Json::object({{"target", Json::raw(plan.target.to_json())},
                         {"step", plan.step},
                         {"residual", plan.residual},
                         {"variation", plan.variation},
                         {"rounding", plan.rounding},
                         {"least", plan.least},
                         {"terms", Json::list(plan.terms, term_of)},
                         {"left_out", plan.left_out},
                         {"bytes", report.bytes_written},
                         {"files", report.files}}));
}

int synthesize(const PosthocOptions& options) {
  const bool writes = !options.output.path.empty();
  if (writes) posthoc::check_output(options.directory, options.output.path);
  const posthoc::Plan plan =
      posthoc::plan(options.directory,
                    {.target = Schedule::power(*options.sigma_rel), .step = options.step, .poll = check_interrupted});
  if (!writes) {
    options.output.json ? print_json(plan, {}) : print_plan(plan, {}, options.output);
    return 0;
  }
  MergeOptions merge_options = options.output.merge_options("posthoc", options.threads);
  const MergeReport report = posthoc::synthesize(*solo(), plan, options.output.path, merge_options);
  merge_options.progress = {};  // its line goes away
  note_written(options.output.path);
  options.output.json ? print_json(plan, report) : print_plan(plan, report, options.output);
  return 0;
}

int posthoc_verb(const PosthocOptions& options) {
  if (!options.sweep && !options.sigma_rel)
    base::fail(Code::kInvalidArgument,
               "give --sigma-rel, and -o to have that average, or --sweep for a table of the errors; see shardow "
               "posthoc --help");
  return options.sigma_rel ? synthesize(options) : sweep(options);
}

}  // namespace

void add_posthoc(CLI::App& app, Action& chosen) {
  std::shared_ptr<PosthocOptions> options;
  CLI::App& verb = add_verb(app, chosen, "posthoc",
                            "Make the average with a power profile that was not tracked, from snapshots of those that "
                            "were; say how near it comes",
                            posthoc_verb, options);
  verb.add_option("DIR", options->directory, "where EMA.snapshot() wrote, or the directory of whole checkpoints")
      ->required();
  CLI::Option* const sigma = verb.add_option("--sigma-rel", options->sigma_rel,
                                             "width of the profile, in parts of the training's length: at most 0.28; "
                                             "without -o, how near the average would come")
                                 ->option_text("S");
  verb.add_option("--step", options->step, "the average at this step; by default at the last snapshot")
      ->transform([](const std::string& step) {
        const size_t first = step.find_first_not_of('0');
        return first == std::string::npos || first == 0 ? step : step.substr(first);
      })
      ->option_text(
          "N");  // in base ten: CLI11 takes zeros before it, which names of snapshots have, for a sign of base eight
  std::vector<CLI::Option*> others = add_output(verb, options->output, false);
  others.push_back(sigma);
  CLI::Option* const table =
      verb.add_flag("--sweep", options->sweep, "instead, the error to expect of each width; reads headers alone");
  for (CLI::Option* other : others) table->excludes(other);
  add_threads(verb, options->threads);
  add_examples(verb, {{"What can be had", "shardow posthoc run/snapshots --sweep"},
                      {"Have it", "shardow posthoc run/snapshots --sigma-rel 0.15 -o run/ema-0.15.safetensors"}});
}

}  // namespace shardow::cli

// Averages of checkpoints: the merge engine (shardow/merge.h) from the command line.
#include <charconv>

#include "base/errors.h"
#include "cli/exit_status.h"
#include "cli/lanes.h"
#include "cli/output.h"
#include "cli/sources.h"
#include "merge/rules.h"

namespace shardow::cli {
namespace {

struct AverageOptions {
  std::vector<std::string> inputs;
  OutputOptions output;
  bool uniform = false, per_step = false, normalize = false;
  std::optional<double> ema;
  size_t lawa = 0;
  std::string curve;
  std::optional<std::string> weights, steps;
  int threads = 0;
};

/// All of `text`, in base ten: steps in names of directories begin with zeros.
template <class Number>
bool is_read(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

/// "0.5,0.3": as many numbers as there are inputs.
template <class Number>
std::vector<Number> numbers(const std::string& text, const char* option, size_t inputs) {
  std::vector<Number> found;
  for (const std::string& one : CLI::detail::split(text, ',')) {
    if (!is_read(one, found.emplace_back()))
      base::fail(Code::kInvalidArgument, "{} '{}': '{}' is no {}", option, text, one,
                 std::is_integral_v<Number> ? "whole number below 2^63" : "number");
  }
  if (found.size() != inputs)
    base::fail(Code::kInvalidArgument, "{} has {} numbers for {} inputs", option, found.size(), inputs);
  return found;
}

std::vector<MergeInput> open_inputs(const AverageOptions& options) {
  std::vector<int64_t> steps;
  if (options.steps) steps = numbers<int64_t>(*options.steps, "--steps", options.inputs.size());
  std::vector<MergeInput> inputs;
  for (size_t i = 0; i < options.inputs.size(); ++i) {
    const Checkpoint checkpoint = open_one(options.inputs[i]);
    const auto step = steps.empty() ? step_of(options.inputs[i], checkpoint.metadata()) : std::optional(steps[i]);
    inputs.push_back({options.inputs[i], checkpoint, 0, step});
  }
  return inputs;
}

MergeRule rule_of(const AverageOptions& options) {
  using Kind = MergeRule::Kind;
  if (options.weights) {  // in the order of the command line
    return {Kind::kWeights, numbers<double>(*options.weights, "--weights", options.inputs.size()), options.normalize};
  }
  if (options.ema) return {.kind = Kind::kEma, .decay = *options.ema, .per_step = options.per_step};
  if (options.lawa > 0) return {.kind = Kind::kLawa, .last = options.lawa};
  if (!options.curve.empty()) return {.kind = Kind::kCurve, .curve = *find_decay_curve(options.curve)};
  return {};
}

void print_report(const MergeReport& report, const Coefficients& coefficients, const OutputOptions& output) {
  print("{}\n", shown(coefficients.formula));
  for (const MergeReport::Input& input : report.inputs)
    print("  {:>12.9f}  {}{}\n", input.coefficient, shown(input.name),
          input.step ? fmt::format("  (step {})", *input.step) : "");
  if (coefficients.index_error && *coefficients.index_error > 0)
    print("  by index instead of steps, the learning rate would be off by up to {:.3g} of its peak\n",
          *coefficients.index_error);
  if (std::abs(report.sum - 1) > 1e-9) print("  the weights sum to {:.9g}; --normalize divides by it\n", report.sum);
  if (!report.taken.empty()) {
    const bool one = report.taken.size() == 1;
    print("  {} of integers or booleans {} of {}\n", counted(report.taken.size(), "tensor"),
          one ? "is that" : "are those", shown(report.newest));
  }
  print_written(output, report.averaged.size() + report.taken.size(), report);
}

void print_json(const MergeReport& report, const Coefficients& coefficients) {
  const auto input_of = [](const MergeReport::Input& input) {
    return Json::object({{"name", input.name}, {"coefficient", input.coefficient}, {"step", input.step}});
  };
  put_json(Json::object({{"formula", coefficients.formula},
                         {"sum", report.sum},
                         {"index_error", coefficients.index_error},
                         {"inputs", Json::list(report.inputs, input_of)},
                         {"newest", report.newest},
                         {"averaged", report.averaged.size()},
                         {"taken", report.taken},
                         {"bytes", report.bytes_written},
                         {"files", report.files}}));
}

int average(const AverageOptions& options) {
  std::vector<MergeInput> inputs = open_inputs(options);
  const Coefficients coefficients = weigh(inputs, rule_of(options));
  MergeOptions merge_options = options.output.merge_options("average", options.threads);
  merge_options.formula = coefficients.formula;
  const MergeReport report = merge(*solo(), std::move(inputs), options.output.path, merge_options);
  merge_options.progress = {};  // its line goes away
  note_written(options.output.path);
  options.output.json ? print_json(report, coefficients) : print_report(report, coefficients, options.output);
  return 0;
}

}  // namespace

void add_average(CLI::App& app, Action& chosen) {
  std::shared_ptr<AverageOptions> options;
  CLI::App& verb =
      add_verb(app, chosen, "average",
               "Average checkpoints: sums in float64, rounded once; the order of inputs with steps does not matter",
               average, options);
  verb.add_option("IN", options->inputs, "files or directories")->required();
  add_output(verb, options->output);
  std::vector<CLI::Option*> ways;
  ways.push_back(
      verb.add_flag("--uniform", options->uniform, "the mean of all, which is what happens without another choice"));
  ways.push_back(
      verb.add_option("--weights", options->weights, "a weight for each input, in the order of the command line")
          ->option_text("W,W,..."));
  ways.push_back(verb.add_option("--ema", options->ema,
                                 "an exponential moving average with this decay from each input to the next")
                     ->option_text("D"));
  ways.push_back(verb.add_option("--lawa", options->lawa, "the mean of the last inputs")
                     ->check(CLI::PositiveNumber)
                     ->option_text("K"));
  ways.push_back(verb.add_option("--curve", options->curve,
                                 "what a decay of the learning rate from the first input to the last would have given")
                     ->check(CLI::IsMember({"linear", "cosine", "inv-sqrt", "1-sqrt"}))
                     ->option_text("linear|cosine|inv-sqrt|1-sqrt"));
  for (CLI::Option* one : ways) {
    for (CLI::Option* other : ways) {
      if (one != other) one->excludes(other);
    }
  }
  verb.add_flag("--normalize", options->normalize, "divide the weights by their sum")->needs(ways[1]);
  verb.add_flag("--per-step", options->per_step, "the decay is one step's")->needs(ways[2]);
  verb.add_option("--steps", options->steps,
                  "where the inputs stand in training, if neither their metadata nor their names say so; or tokens")
      ->option_text("N,N,...");
  add_threads(verb, options->threads);
  add_examples(verb,
               {{"The mean of three", "shardow average run/step-1000 run/step-2000 run/step-3000 -o mean"},
                {"As if the learning rate had been decayed", "shardow average run/step-* -o decayed --curve 1-sqrt"},
                {"A soup", "shardow average a.safetensors b.safetensors -o soup.safetensors --weights 0.7,0.3"}});
}

}  // namespace shardow::cli

// What the command line looks like: one CLI::App from which parsing and --help come. tools/pages.py makes docs/cli.md,
// the man page and completions from --help.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <vector>

namespace shardow::cli {

/// What a verb does when its arguments are known; returns the exit status: 0, or 1 for a check that failed.
using Action = std::function<int()>;

/// Each verb adds its description to the app, and when it is called puts itself into `chosen`.
void add_inspect(CLI::App& app, Action& chosen);
void add_verify(CLI::App& app, Action& chosen);
void add_diff(CLI::App& app, Action& chosen);
void add_convert(CLI::App& app, Action& chosen);
void add_average(CLI::App& app, Action& chosen);
void add_posthoc(CLI::App& app, Action& chosen);

/// Everything.
std::unique_ptr<CLI::App> make_app(Action& chosen);

/// From arguments to an exit status.
int run(int argc, char** argv) noexcept;

/// "--json" of a verb. Errors are JSON then, too.
void add_json(CLI::App& verb, bool& json);

/// "--threads N", 4 unless given: reads in flight.
void add_threads(CLI::App& verb, int& threads);

/// Examples at the end of a verb's help: a line each, what it is for, and the command.
struct Example {
  const char *purpose, *command;
};
void add_examples(CLI::App& verb, const std::vector<Example>& examples);

/// A verb whose options live in one struct, which its action is given.
template <class Options>
CLI::App& add_verb(CLI::App& app, Action& chosen, const char* name, const char* description, int (*run)(const Options&),
                   std::shared_ptr<Options>& options) {
  options = std::make_shared<Options>();
  CLI::App& verb = *app.add_subcommand(name, description)->group("Verbs");
  verb.callback([&chosen, run, options] { chosen = [run, options] { return run(*options); }; });
  return verb;
}

}  // namespace shardow::cli

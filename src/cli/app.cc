#include "cli/app.h"

#include <fmt/format.h>

#include "cli/exit_status.h"
#include "cli/help.h"
#include "cli/lanes.h"

namespace shardow::cli {
void add_json(CLI::App& verb, bool& json) {
  verb.add_flag("--json", json, "one JSON document on standard output; errors too");
}

void add_threads(CLI::App& verb, int& threads) {
  threads = kLanes;
  verb.add_option("--threads", threads,
                  "threads that read, of a verb that writes 8 at most; results do not depend on it")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->option_text("N");
}

void add_examples(CLI::App& verb, const std::vector<Example>& examples) {
  std::string text = "Examples:";
  for (const Example& one : examples) text += fmt::format("\n  {}\n      $ {}", one.purpose, one.command);
  verb.footer(text);
}

std::unique_ptr<CLI::App> make_app(Action& chosen) {
  auto app = std::make_unique<CLI::App>(
      "Averages and checkpoints in safetensors files: look into them, check them, compare them.", "shardow");
  app->formatter(std::make_shared<Help>());
  app->option_defaults()->always_capture_default(false);
  app->set_help_flag("-h,--help", "this help");
  app->set_version_flag("--version", "shardow " SHARDOW_VERSION, "the version");
  app->require_subcommand(1);
  add_inspect(*app, chosen);
  add_verify(*app, chosen);
  add_diff(*app, chosen);
  add_convert(*app, chosen);
  add_average(*app, chosen);
  add_posthoc(*app, chosen);
  app->footer(
      "shardow VERB --help explains a verb. Text is for people, --json for programs. Progress is shown on\n"
      "a terminal alone, and so are colours, unless NO_COLOR is set. PATH is a .safetensors file, or a\n"
      "directory with a model in the Hugging Face layout or with other .safetensors files. In JSON, bytes\n"
      "of a path that are no UTF-8 are \\udc80 to \\udcff, as Python's surrogateescape has them.\n\n"
      "Exit status:\n" +
      exit_status_table());
  return app;
}

}  // namespace shardow::cli

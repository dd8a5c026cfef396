#include "cli/app.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "cli/exit_status.h"
#include "cli/lanes.h"
#include "cli/terminal.h"
#include "cli/text.h"

namespace shardow::cli {
namespace {

constexpr size_t kColumns = 100;

/// Lines of `width` at most; lines that are there stay.
std::string wrapped(const std::string& text, size_t width) {
  std::string out;
  size_t column = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!out.empty()) out += '\n';
    column = 0;
    std::istringstream words(line);
    for (std::string word; words >> word; column += word.size()) {
      if (column > 0 && column + 1 + word.size() > width) {
        out += '\n';
        column = 0;
      } else if (column > 0) {
        out += ' ';
        ++column;
      }
      out += word;
    }
  }
  return out;
}

/// CLI11's help, wrapped at 100 columns, with an option's values as its option_text() spells them: "N",
/// "float64|float32".
class Help : public CLI::Formatter {
 public:
  Help() { column_width(26); }

  std::string make_description(const CLI::App* app) const override {
    return wrapped(app->get_description(), kColumns) + "\n\n";
  }

  std::string make_usage(const CLI::App* app, std::string) const override {
    const bool is_verb = app->get_parent() != nullptr;
    std::string usage =
        is_verb ? fmt::format("Usage: shardow {} [OPTIONS]", app->get_name()) : "Usage: shardow VERB ...";
    for (const CLI::Option* one : app->get_options([](const CLI::Option* one) { return one->get_positional(); }))
      usage += " " + make_option_usage(one);
    return usage + "\n";
  }

  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    if (positional) return option->get_name(true);
    std::vector<std::string> names;
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    return fmt::format("{}", fmt::join(names, ", "));
  }

  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string& text = option->get_option_text();
    if (text.empty() || option->get_positional()) return "";
    return " " + text;
  }

  std::string make_option_desc(const CLI::Option* option) const override {
    std::string text = option->get_description();
    if (!option->get_default_str().empty()) text += fmt::format(" (default: {})", option->get_default_str());
    if (option->get_required() && !option->get_positional()) text += " (required)";
    return wrapped(text, kColumns - get_column_width());
  }

  std::string make_subcommand(const CLI::App* verb) const override {
    std::stringstream out;
    CLI::detail::format_help(out, verb->get_name(), wrapped(verb->get_description(), kColumns - get_column_width()),
                             get_column_width());
    return out.str();
  }
};

[[noreturn]] void no_verb(std::string_view word) {
  base::fail(Code::kInvalidArgument, "there is no verb '{}'; see shardow --help", word);
}

/// Answers what CLI11 has to say, `first` being the first word: help and the version are no errors, all else is a wrong
/// call.
int answer(const CLI::App& app, const CLI::ParseError& error, std::string_view first) {
  const CLI::App* verb = &app;
  while (!verb->get_subcommands().empty()) verb = verb->get_subcommands().front();
  if (error.get_name() == "CallForHelp" || error.get_name() == "CallForAllHelp") {
    put(app.help());
  } else if (error.get_name() == "CallForVersion") {
    put(std::string(error.what()) + "\n");
  } else {
    if (verb == &app && !first.empty() && !first.starts_with('-')) no_verb(first);
    if (verb == &app && first.empty()) base::fail(Code::kInvalidArgument, "a verb is required; see shardow --help");
    const std::string name = verb == &app ? "shardow" : "shardow " + verb->get_name();
    base::fail(Code::kInvalidArgument, "{}; see {} --help", error.what(), name);
  }
  flush_output();
  return 0;
}

}  // namespace

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

int run(int argc, char** argv) noexcept {
  const bool json = std::any_of(argv, argv + argc, [](const char* word) { return std::string_view(word) == "--json"; });
  try {
    prepare_process();
    Action chosen;
    const auto app = make_app(chosen);
    std::vector<std::string> words(argv + 1, argv + argc);
    if (!words.empty() && words[0] == "help") {  // "help inspect" is "inspect --help"
      words.erase(words.begin());
      const auto is_it = [&](const CLI::App* verb) { return !words.empty() && verb->get_name() == words[0]; };
      if (!words.empty() && app->get_subcommands(is_it).empty()) no_verb(words[0]);
      words.emplace_back("--help");
    }
    const std::string first = words.empty() ? "" : words[0];
    std::reverse(words.begin(), words.end());  // as CLI11 takes them
    try {
      app->parse(std::move(words));
    } catch (const CLI::ParseError& error) {
      return answer(*app, error, first);
    }
    const int status = chosen();
    flush_output();
    return status;
  } catch (...) {
    return report_exception(json);
  }
}

}  // namespace shardow::cli

#include "cli/help.h"

#include <fmt/format.h>

#include <sstream>

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

}  // namespace

std::string Help::make_description(const CLI::App* app) const {
  return wrapped(app->get_description(), kColumns) + "\n\n";
}

std::string Help::make_usage(const CLI::App* app, std::string) const {
  const bool is_verb = app->get_parent() != nullptr;
  std::string usage = is_verb ? fmt::format("Usage: shardow {} [OPTIONS]", app->get_name()) : "Usage: shardow VERB ...";
  for (const CLI::Option* one : app->get_options([](const CLI::Option* one) { return one->get_positional(); }))
    usage += " " + make_option_usage(one);
  return usage + "\n";
}

std::string Help::make_option_name(const CLI::Option* option, bool positional) const {
  if (positional) return option->get_name(true);
  std::vector<std::string> names;
  for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string Help::make_option_opts(const CLI::Option* option) const {
  const std::string& text = option->get_option_text();
  if (text.empty() || option->get_positional()) return "";
  return " " + text;
}

std::string Help::make_option_desc(const CLI::Option* option) const {
  std::string text = option->get_description();
  if (!option->get_default_str().empty()) text += fmt::format(" (default: {})", option->get_default_str());
  if (option->get_required() && !option->get_positional()) text += " (required)";
  return wrapped(text, kColumns - get_column_width());
}

std::string Help::make_subcommand(const CLI::App* verb) const {
  std::stringstream out;
  CLI::detail::format_help(out, verb->get_name(), wrapped(verb->get_description(), kColumns - get_column_width()),
                           get_column_width());
  return out.str();
}

}  // namespace shardow::cli

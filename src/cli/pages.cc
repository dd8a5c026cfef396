// docs/cli.md and the man page.
#include <fmt/format.h>

#include <sstream>

#include "cli/exit_status.h"
#include "cli/help.h"

namespace shardow::cli {
namespace {

std::string help_of(const CLI::App& app) {
  return app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal);
}

/// What troff would take for its own: backslashes, minus signs, dots and quotes at the beginning of a line.
std::string troff(const std::string& text) {
  std::string out;
  bool begins = true;
  for (const char c : text) {
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    begins = c == '\n';
    out += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  }
  return out;
}

void add_options(std::string& page, const CLI::App& verb) {
  const Help help;
  std::vector<const CLI::Option*> all = positionals_of(verb);
  for (const CLI::Option* option : options_of(verb)) all.push_back(option);
  for (const CLI::Option* option : all) {
    const std::string name = help.make_option_name(option, option->get_positional()) + help.make_option_opts(option);
    page += fmt::format(".TP\n.B {}\n{}\n", troff(name), troff(help.make_option_desc(option)));
  }
}

}  // namespace

std::string markdown_page(const CLI::App& app) {
  std::string page = fmt::format(
      "# The command `shardow`\n\nThis page is what `--help` says, by `shardow manual markdown`; a test keeps them "
      "equal. `man shardow` "
      "says the same.\n\n"
      "Completion: `source <(shardow completion bash)` in `~/.bashrc`, `source <(shardow completion zsh)` in "
      "`~/.zshrc` after `compinit`,\n"
      "`shardow completion fish | source` in `~/.config/fish/config.fish`.\n\n```\n{}```\n",
      help_of(app));
  for (const CLI::App* verb : verbs_of(app))
    page += fmt::format("\n## shardow {}\n\n```\n{}```\n", verb->get_name(), help_of(*verb));
  return page;
}

std::string man_page(const CLI::App& app) {
  std::string page = fmt::format(
      ".TH SHARDOW 1 \"\" \"shardow {}\"\n.SH NAME\nshardow \\- {}\n.SH SYNOPSIS\n.B shardow\nVERB ...\n.SH "
      "DESCRIPTION\n{}\n",
      SHARDOW_VERSION, troff(app.get_description()), troff(app.get_description()));
  page += ".SH VERBS\n";
  for (const CLI::App* verb : verbs_of(app)) {
    page += fmt::format(".SS shardow {}\n{}\n", verb->get_name(), troff(verb->get_description()));
    add_options(page, *verb);
    page += fmt::format(".PP\n.nf\n{}\n.fi\n", troff(verb->get_footer()));
  }
  return page + fmt::format(".SH \"EXIT STATUS\"\n.nf\n{}\n.fi\n", troff(exit_status_table()));
}

}  // namespace shardow::cli

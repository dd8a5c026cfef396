// How the command line describes itself: --help, and what is made of the same description.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace shardow::cli {

/// CLI11's help, wrapped at 100 columns, with an option's values as its option_text() spells them: "N",
/// "bash|zsh|fish", "[=check|write]".
class Help : public CLI::Formatter {
 public:
  Help() { column_width(26); }
  std::string make_description(const CLI::App* app) const override;
  std::string make_usage(const CLI::App* app, std::string name) const override;
  std::string make_option_name(const CLI::Option* option, bool positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_subcommand(const CLI::App* verb) const override;
};

std::vector<const CLI::App*> verbs_of(const CLI::App& app);        ///< that are no secret
std::vector<const CLI::Option*> options_of(const CLI::App& verb);  ///< without the positional ones
std::vector<const CLI::Option*> positionals_of(const CLI::App& verb);
std::vector<std::string> choices_of(const CLI::Option& option);  ///< of "bash|zsh|fish"; else none
bool takes_value(const CLI::Option& option);                     ///< in a word of its own

/// docs/cli.md; the man page in troff; completions for a shell. All from the app, nothing by hand.
std::string markdown_page(const CLI::App& app);
std::string man_page(const CLI::App& app);
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace shardow::cli

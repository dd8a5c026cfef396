// How the command line describes itself.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace shardow::cli {

/// CLI11's help, wrapped at 100 columns, with an option's values as its option_text() spells them: "N",
/// "float64|float32".
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

}  // namespace shardow::cli

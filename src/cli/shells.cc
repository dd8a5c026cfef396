// Completions: verbs, then a verb's options and the choices of their values; all else are names of files.
#include <fmt/format.h>

#include "cli/help.h"

namespace shardow::cli {
namespace {

std::vector<std::string> words_of(const CLI::Option& option) {
  std::vector<std::string> words;
  for (const std::string& name : option.get_snames()) words.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) words.push_back("--" + name);
  return words;
}

/// In single quotes, for a shell.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// Behind a colon or in brackets, zsh reads on.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : first_line(text))
    out += c == ':' || c == '[' || c == ']' ? std::string("\\") + c : std::string(1, c);
  return out;
}

std::string verb_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : verbs_of(app)) names.push_back(verb->get_name());
  return fmt::format("{}", fmt::join(names, " "));
}

}  // namespace

std::string bash_completion(const CLI::App& app) {
  std::string out = "_shardow() {\n  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=\n";
  out += fmt::format(
      "  if [ \"$COMP_CWORD\" -eq 1 ]; then COMPREPLY=($(compgen -W '{} --help --version' -- \"$word\")); return; fi\n",
      verb_names(app));
  out += "  case \"${COMP_WORDS[1]} $before\" in\n";
  for (const CLI::App* verb : verbs_of(app)) {
    for (const CLI::Option* option : options_of(*verb)) {
      for (const std::string& name : words_of(*option)) {
        if (!choices_of(*option).empty())
          out +=
              fmt::format("    '{} {}') words='{}' ;;\n", verb->get_name(), name, fmt::join(choices_of(*option), " "));
      }
    }
  }
  out += "    *) case \"${COMP_WORDS[1]}\" in\n";
  for (const CLI::App* verb : verbs_of(app)) {
    std::vector<std::string> words;
    for (const CLI::Option* option : options_of(*verb)) {
      for (std::string& name : words_of(*option)) words.push_back(std::move(name));
    }
    out += fmt::format("      {}) if [[ $word == -* ]]; then words='{}'", verb->get_name(), fmt::join(words, " "));
    for (const CLI::Option* option : positionals_of(*verb)) {
      if (!choices_of(*option).empty()) out += fmt::format("; else words='{}'", fmt::join(choices_of(*option), " "));
    }
    out += "; fi ;;\n";
  }
  return out +
         "    esac ;;\n  esac\n  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\ncomplete -o default -F _shardow "
         "shardow\n";
}

std::string zsh_completion(const CLI::App& app) {
  std::string out = "#compdef shardow\n_shardow() {\n  local -a verbs\n  verbs=(\n";
  for (const CLI::App* verb : verbs_of(app))
    out += fmt::format("    {}\n", quoted(verb->get_name() + ":" + zsh_text(verb->get_description())));
  out +=
      "  )\n  if (( CURRENT == 2 )); then _describe verb verbs; return; fi\n  local verb=$words[2]\n  shift words; (( "
      "CURRENT-- ))\n  case "
      "$verb in\n";
  for (const CLI::App* verb : verbs_of(app)) {
    out += fmt::format("    {}) _arguments -s", verb->get_name());
    for (const CLI::Option* option : options_of(*verb)) {
      const auto choices = choices_of(*option);
      std::string value;
      if (takes_value(*option))
        value = choices.empty() ? ":value:_files" : fmt::format(":value:({})", fmt::join(choices, " "));
      for (const std::string& name : words_of(*option))
        out += " \\\n      " + quoted(fmt::format("*{}[{}]{}", name, zsh_text(option->get_description()), value));
    }
    const auto positionals = positionals_of(*verb);
    const auto choices = positionals.empty() ? std::vector<std::string>() : choices_of(*positionals[0]);
    out += " \\\n      " +
           quoted(choices.empty() ? "*:file:_files" : fmt::format("1:choice:({})", fmt::join(choices, " "))) + " ;;\n";
  }
  return out +
         "  esac\n}\nif [ \"$funcstack[1]\" = _shardow ]; then _shardow \"$@\"; else compdef _shardow shardow; fi\n";
}

std::string fish_completion(const CLI::App& app) {
  std::string out;
  for (const CLI::App* verb : verbs_of(app)) {
    out += fmt::format("complete -c shardow -n __fish_use_subcommand -f -a {} -d {}\n", verb->get_name(),
                       quoted(first_line(verb->get_description())));
    const std::string condition =
        fmt::format("complete -c shardow -n '__fish_seen_subcommand_from {}'", verb->get_name());
    for (const CLI::Option* option : options_of(*verb)) {
      out += condition;
      for (const std::string& name : option->get_snames()) out += " -s " + name;
      for (const std::string& name : option->get_lnames()) out += " -l " + name;
      if (takes_value(*option))
        out += choices_of(*option).empty() ? " -r" : fmt::format(" -x -a '{}'", fmt::join(choices_of(*option), " "));
      out += fmt::format(" -d {}\n", quoted(first_line(option->get_description())));
    }
    for (const CLI::Option* option : positionals_of(*verb)) {
      if (!choices_of(*option).empty())
        out += fmt::format("{} -f -a '{}'\n", condition, fmt::join(choices_of(*option), " "));
    }
  }
  return out;
}

}  // namespace shardow::cli

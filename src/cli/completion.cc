// Pages and scripts about the program, by the program.
#include "cli/app.h"
#include "cli/help.h"
#include "cli/terminal.h"

namespace shardow::cli {
namespace {

using Page = std::string (*)(const CLI::App&);

void add_pages(CLI::App& app, Action& chosen, CLI::App& verb, const std::map<std::string, Page>& pages,
               const char* what) {
  auto name = std::make_shared<std::string>();
  std::vector<std::string> names;
  names.reserve(pages.size());
  for (const auto& [known, page] : pages) names.push_back(known);
  verb.add_option("WHICH", *name, what)
      ->required()
      ->check(CLI::IsMember(names))
      ->option_text(CLI::detail::join(names, "|"));
  verb.callback([&app, &chosen, name, pages] {
    chosen = [&app, name, pages] {
      put(pages.at(*name)(app));
      return 0;
    };
  });
}

}  // namespace

void add_completion(CLI::App& app, Action& chosen) {
  CLI::App& verb =
      *app.add_subcommand("completion", "Print what a shell needs to complete this command's words")->group("Verbs");
  add_pages(app, chosen, verb, {{"bash", bash_completion}, {"fish", fish_completion}, {"zsh", zsh_completion}},
            "bash, fish or zsh");
  add_examples(verb, {{"In this shell", "source <(shardow completion bash)"}});
}

void add_manual(CLI::App& app, Action& chosen) {
  CLI::App& verb = *app.add_subcommand("manual", "Print the man page, or docs/cli.md")->group("");
  add_pages(app, chosen, verb, {{"man", man_page}, {"markdown", markdown_page}}, "man or markdown");
}

}  // namespace shardow::cli

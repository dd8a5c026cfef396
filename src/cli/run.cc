#include "cli/run.h"

#include <algorithm>
#include <string_view>

#include "base/errors.h"
#include "cli/app.h"
#include "cli/exit_status.h"
#include "cli/terminal.h"
#include "cli/text.h"

namespace shardow::cli {
namespace {

/// Of what CLI11 has to say, `first` being the first word: help and the version are no errors, all else is a wrong
/// call.
int answer(const CLI::App& app, const CLI::ParseError& error, std::string_view first) {
  const CLI::App* verb = &app;
  while (!verb->get_subcommands().empty()) verb = verb->get_subcommands().front();
  if (error.get_name() == "CallForHelp" || error.get_name() == "CallForAllHelp") {
    put(app.help());
  } else if (error.get_name() == "CallForVersion") {
    put(std::string(error.what()) + "\n");
  } else {
    if (verb == &app && !first.empty() && !first.starts_with('-'))
      base::fail(Code::kInvalidArgument, "there is no verb '{}'; see shardow --help", first);
    if (verb == &app && first.empty()) base::fail(Code::kInvalidArgument, "a verb is required; see shardow --help");
    const std::string name = verb == &app ? "shardow" : "shardow " + verb->get_name();
    base::fail(Code::kInvalidArgument, "{}; see {} --help", error.what(), name);
  }
  flush_output();
  return 0;
}

}  // namespace

int run(int argc, char** argv) noexcept {
  const bool json = std::any_of(argv, argv + argc, [](const char* word) { return std::string_view(word) == "--json"; });
  try {
    prepare_process();
    Action chosen;
    const auto app = make_app(chosen);
    try {
      app->parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return answer(*app, error, argc > 1 ? argv[1] : "");
    }
    const int status = chosen();
    flush_output();
    return status;
  } catch (...) {
    return report_exception(json);
  }
}

}  // namespace shardow::cli

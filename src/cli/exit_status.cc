#include "cli/exit_status.h"

#include <csignal>
#include <exception>
#include <map>
#include <new>
#include <vector>

#include "base/errors.h"
#include "cli/terminal.h"
#include "cli/text.h"

namespace shardow::cli {
namespace {

std::vector<std::string> published;  // what is in its place, whatever else goes wrong

int report(Code code, std::string message, bool json) {
  if (!published.empty())
    message += fmt::format("; {} had been written by then, and is whole", fmt::join(published, ", "));
  complain(shown(message));
  if (json) {
    put_json(Json::object({{"error", Json::object({{"code", base::code_name(code)}, {"message", message}})}}));
    flush_output();
  }
  return base::exit_code(code);
}

int report_current(bool json) {
  try {
    throw;
  } catch (const Interrupted& interrupted) {
    die_of(interrupted.signal);
  } catch (const ClosedPipe&) {
    die_of(SIGPIPE);
  } catch (const Error& error) {
    return report(error.code(), error.what(), json);
  } catch (const std::bad_alloc&) {
    return report(Code::kOutOfMemory, "out of memory", json);
  } catch (const std::exception& error) {
    return report(Code::kInternal, std::string("a bug: ") + error.what(), json);
  }
}

}  // namespace

std::string exit_status_table() {
  std::map<int, std::string> rows = {{0, "done; verify: all is well; diff: no difference"},
                                     {kDifferent, "verify: something is wrong; diff: something differs"}};
  for (int i = 0; i <= static_cast<int>(Code::kInternal); ++i) {
    const auto [name, status, meaning] = base::row_of(static_cast<Code>(i));
    rows[status] = fmt::format("{}: {}", name, meaning);
  }
  std::string table;
  for (const auto& [status, text] : rows) table += fmt::format("  {:>2}  {}\n", status, text);
  return table +
         "  Interrupted by a signal, it dies of that signal. What a verb writes takes the place of what\n"
         "  was there once it is whole; the message of an error after that says that it was written.";
}

void note_written(const std::string& path) {
  published.push_back(path);
}

int report_exception(bool json) noexcept {
  try {
    return report_current(json);
  } catch (const Interrupted& interrupted) {  // while it waited for whoever reads the report
    die_of(interrupted.signal);
  } catch (const ClosedPipe&) {
    die_of(SIGPIPE);
  } catch (const Error& error) {  // of the report itself
    return base::exit_code(error.code());
  } catch (...) {
    return base::exit_code(Code::kInternal);
  }
}

}  // namespace shardow::cli

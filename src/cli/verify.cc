// Are these files what was written? Headers by every rule, indexes against files, tensors against their checksums.
#include <algorithm>

#include "base/errors.h"
#include "base/paths.h"
#include "cli/app.h"
#include "cli/checks.h"
#include "cli/exit_status.h"
#include "cli/sources.h"
#include "cli/terminal.h"
#include "cli/text.h"

namespace shardow::cli {
namespace {

namespace fs = std::filesystem;

struct VerifyOptions {
  std::vector<std::string> paths;
  int threads = 0;
  bool json = false;
};

/// Without the path in front, which stands there already.
std::string problem_of(const Error& error, const fs::path& path) {
  const std::string text = error.what(), front = path.string() + ": ";
  return text.starts_with(front) ? text.substr(front.size()) : text;
}

/// One path of the command line.
struct Asked {
  fs::path path;
  std::vector<FileCheck> files;
  std::vector<std::string> problems;  ///< of the directory's index
  std::optional<Error> trouble;

  /// Work that may find the path wrong, or impossible to read.
  template <class Work>
  void attempt(const Work& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.code() == Code::kCorrupt) {
        problems.push_back(problem_of(error, path));
      } else if (!trouble) {
        trouble = error;
      }
    }
  }
};

void add_file(Asked& asked, const fs::path& path) {
  FileCheck& file = asked.files.emplace_back();
  file.path = path;
  const bool foreign = path.extension() != ".safetensors";
  try {
    file.checkpoint = open_checkpoint(path);
  } catch (const Error& error) {
    if (error.code() == Code::kCorrupt || (error.code() == Code::kUnsupported && !foreign)) {
      file.problems.push_back(problem_of(error, path));
    } else {
      file.trouble = error;
    }
  }
}

void find_files(Asked& asked) {
  if (!base::leads_to_directory(asked.path)) return add_file(asked, asked.path);
  if (has_model(asked.path))
    asked.attempt([&] { Checkpoint::open(asked.path); });  // each tensor is where the index says
  const std::vector<std::string> names = safetensors_in(asked.path);
  if (names.empty())
    base::fail(Code::kNotFound, "{}: there is no .safetensors file in this directory", asked.path.string());
  for (const std::string& name : names) add_file(asked, asked.path / name);
}

std::string what_was_checked(const FileCheck& file) {
  const auto tensors = static_cast<int64_t>(file::Inside::of(*file.checkpoint).tensors.size());
  const int64_t known = file.sums->known();
  const std::string text = known == 0 ? fmt::format("header of {}, which has no checksums", counted(tensors, "tensor"))
                                      : fmt::format("{} of {} by their checksums", known, counted(tensors, "tensor"));
  return fmt::format("{}, {}", text, shown_bytes(file.size));
}

void print_text(const std::vector<Asked>& all) {
  for (const Asked& asked : all) {
    for (const FileCheck& file : asked.files) {
      if (file.trouble) continue;  // to standard error
      const std::string path = shown(file.path.string());
      if (file.problems.empty()) print("{}: {} ({})\n", path, coloured(Colour::kGood, "OK"), what_was_checked(file));
      for (const std::string& problem : file.problems)
        print("{}: {}: {}\n", path, coloured(Colour::kBad, "FAILED"), shown(problem));
    }
    for (const std::string& problem : asked.problems)
      print("{}: {}: {}\n", shown(asked.path.string()), coloured(Colour::kBad, "FAILED"), shown(problem));
  }
}

void print_json(const std::vector<Asked>& all, bool sound) {
  const auto error_of = [](const std::optional<Error>& trouble) {
    return trouble ? Json::object({{"code", base::code_name(trouble->code())}, {"message", trouble->what()}}) : nullptr;
  };
  const auto file_of = [&](const FileCheck& file) {
    return Json::object({{"path", file.path},
                         {"bytes", file.size},
                         {"tensors", file.checkpoint ? file::Inside::of(*file.checkpoint).tensors.size() : 0},
                         {"checksums", file.sums ? file.sums->known() : 0},
                         {"problems", file.problems},
                         {"error", error_of(file.trouble)}});
  };
  const auto path_of = [&](const Asked& asked) {
    return Json::object({{"path", asked.path},
                         {"problems", asked.problems},
                         {"error", error_of(asked.trouble)},
                         {"files", Json::list(asked.files, file_of)}});
  };
  put_json(Json::object({{"ok", sound}, {"paths", Json::list(all, path_of)}}));
}

void check_all(std::vector<Asked>& all, const VerifyOptions& options) {
  std::vector<FileCheck> files;  // all paths' together, so that lanes have enough to do
  for (Asked& asked : all) std::move(asked.files.begin(), asked.files.end(), std::back_inserter(files));
  ProgressLine line("verify");
  run_checks(files, options.threads, [&](int64_t done, int64_t total) { line.tell(done, total); });
  auto next = files.begin();
  for (Asked& asked : all) {
    for (FileCheck& file : asked.files) file = std::move(*next++);
  }
}

/// The first trouble is the status of all; else 1 where something is wrong.
int status_of(const std::vector<Asked>& all) {
  bool sound = true;
  std::optional<Error> first;
  const auto look = [&](const std::vector<std::string>& problems, const std::optional<Error>& trouble) {
    sound &= problems.empty();
    if (!trouble) return;
    complain(shown(trouble->what()));
    if (!first) first = trouble;
  };
  for (const Asked& asked : all) {
    look(asked.problems, asked.trouble);
    for (const FileCheck& file : asked.files) look(file.problems, file.trouble);
  }
  return first ? base::exit_code(first->code()) : sound ? 0 : kDifferent;
}

int verify(const VerifyOptions& options) {
  std::vector<Asked> all;
  for (const std::string& path : options.paths) {
    Asked& asked = all.emplace_back();
    asked.path = path;
    asked.attempt([&] { find_files(asked); });
  }
  check_all(all, options);
  const int status = status_of(all);
  options.json ? print_json(all, status == 0) : print_text(all);
  return status;
}

}  // namespace

void add_verify(CLI::App& app, Action& chosen) {
  std::shared_ptr<VerifyOptions> options;
  CLI::App& verb = add_verb(app, chosen, "verify",
                            "Check files: headers by every rule, indexes, tensors by their checksums", verify, options);
  verb.add_option("PATH", options->paths, "files or directories")->required();
  add_threads(verb, options->threads);
  add_json(verb, options->json);
  add_examples(verb, {{"One file, or all of a directory", "shardow verify run/ema.safetensors run/step-000001000"}});
}

}  // namespace shardow::cli

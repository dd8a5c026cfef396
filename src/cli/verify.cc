// Are these files what was written? Headers by every rule, indexes against files, tensors against their checksums,
// files against a manifest.
#include <algorithm>

#include "base/errors.h"
#include "base/paths.h"
#include "cli/app.h"
#include "cli/checks.h"
#include "cli/exit_status.h"
#include "cli/manifest.h"
#include "cli/sources.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "file/index.h"
#include "file/names.h"

namespace shardow::cli {
namespace {

namespace fs = std::filesystem;

struct VerifyOptions {
  std::vector<std::string> paths;
  std::string manifest;  ///< "", "auto", "check", "write"
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
  bool directory = false;
  std::vector<FileCheck> files;
  std::vector<std::string> problems;  ///< of the directory: its index, its manifest
  std::optional<Error> trouble;
  fs::path manifest;
  std::optional<Digests> expected;       ///< what the manifest says
  bool writes = false, written = false;  ///< the manifest

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

/// `hashed`: a file of another format is one, too, of which nothing but its SHA-256 is asked.
void add_file(Asked& asked, const fs::path& path, bool hashed) {
  FileCheck& file = asked.files.emplace_back();
  file.path = path;
  file.name = path.filename().string();
  const bool foreign = path.extension() != ".safetensors";
  try {
    file.checkpoint = open_checkpoint(path);
  } catch (const Error& error) {
    if (foreign && hashed && (error.code() == Code::kCorrupt || error.code() == Code::kUnsupported)) return;
    if (error.code() == Code::kCorrupt || (error.code() == Code::kUnsupported && !foreign)) {
      file.problems.push_back(problem_of(error, path));
    } else {
      file.trouble = error;
    }
  }
}

void find_files(Asked& asked, bool hashed) {
  const fs::path stands = file::standing(asked.path);
  asked.directory = base::leads_to_directory(stands);
  if (!asked.directory) {
    add_file(asked, asked.path, hashed);
    return;
  }
  if (has_model(stands)) asked.attempt([&] { Checkpoint::open(stands); });  // each tensor is where the index says
  const std::vector<std::string> names = safetensors_in(stands);
  if (names.empty())
    base::fail(Code::kNotFound, "{}: there is no .safetensors file in this directory", asked.path.string());
  for (const std::string& name : names) add_file(asked, stands / name, hashed);
}

/// What is to be hashed, and what it should be.
void plan_manifest(Asked& asked, const std::string& mode) {
  asked.manifest = manifest_of(asked.path);
  const auto found = base::look_at(asked.manifest);
  if (found && !found->regular()) {
    asked.files.clear();
    base::fail(Code::kInvalidArgument, "{} is no regular file, and no manifest can stand there",
               asked.manifest.string());
  }
  const bool is_there = found.has_value();
  asked.writes = mode == "write" || (mode == "auto" && !is_there);
  if (!asked.writes) asked.expected = read_manifest(asked.manifest);
  const fs::path folder = base::parent_of(asked.manifest);
  const auto has = [&](const std::string& name) {
    return std::any_of(asked.files.begin(), asked.files.end(),
                       [&](const FileCheck& file) { return file.name == name; });
  };
  std::vector<std::string> others;
  if (asked.expected) {
    for (const auto& [name, digest] : *asked.expected) others.push_back(name);
  } else if (asked.directory && base::look_at(folder / file::kIndexName)) {
    others.emplace_back(file::kIndexName);
  }
  for (const std::string& name : others) {
    if (has(name)) continue;
    FileCheck& file = asked.files.emplace_back();
    file.path = folder / name;
    file.name = name;
  }
  for (FileCheck& file : asked.files) {
    file.hashed = true;
    if (asked.expected && !asked.expected->contains(file.name))
      file.problems.push_back(fmt::format("{} does not name it", asked.manifest.string()));
  }
}

void compare_with_manifest(Asked& asked) {
  for (FileCheck& file : asked.files) {
    if (!asked.expected || file.digest.empty()) continue;
    const auto found = asked.expected->find(file.name);
    if (found != asked.expected->end() && found->second != file.digest)
      file.problems.push_back(
          fmt::format("its SHA-256 is {}, {} says {}", file.digest, asked.manifest.string(), found->second));
  }
}

/// Only of files that are as they should be: a manifest would make what is wrong look right.
void write_if_sound(Asked& asked) {
  Digests digests;
  for (const FileCheck& file : asked.files) {
    if (!file.problems.empty() || file.trouble || !asked.problems.empty()) return;
    digests[file.name] = file.digest;
  }
  asked.attempt([&] {
    write_manifest(asked.manifest, digests);
    asked.written = true;
    note_written(asked.manifest.string());
  });
}

std::string what_was_checked(const FileCheck& file) {
  std::string text;
  if (file.checkpoint) {
    const int64_t tensors = static_cast<int64_t>(file::Inside::of(*file.checkpoint).tensors.size());
    const int64_t known = file.sums ? file.sums->known() : 0;
    text = known == 0 ? fmt::format("header of {}, which has no checksums", counted(tensors, "tensor"))
                      : fmt::format("{} of {} by their checksums", known, counted(tensors, "tensor"));
  }
  if (!file.digest.empty()) text += text.empty() ? "SHA-256" : ", SHA-256";
  return fmt::format("{}, {}", text, shown_bytes(file.size));
}

void print_text(const std::vector<Asked>& all) {
  for (const Asked& asked : all) {
    for (const FileCheck& file : asked.files) {
      if (file.trouble) continue;                                                      // to standard error
      if (!file.checkpoint && file.digest.empty() && file.problems.empty()) continue;  // nothing of it was checked
      const std::string path = shown(file.path.string());
      if (file.problems.empty()) print("{}: {} ({})\n", path, coloured(Colour::kGood, "OK"), what_was_checked(file));
      for (const std::string& problem : file.problems)
        print("{}: {}: {}\n", path, coloured(Colour::kBad, "FAILED"), shown(problem));
    }
    for (const std::string& problem : asked.problems)
      print("{}: {}: {}\n", shown(asked.path.string()), coloured(Colour::kBad, "FAILED"), shown(problem));
    if (asked.writes && !asked.trouble)
      print("{}: {}\n", shown(asked.manifest.string()), asked.written ? "written" : "not written");
  }
}

void print_json(const std::vector<Asked>& all, bool sound) {
  const auto add_problems = [](Json& json, const std::vector<std::string>& problems,
                               const std::optional<Error>& trouble) {
    json.key("problems").begin_list();
    for (const std::string& problem : problems) json.text(problem);
    json.end_list().key("error");
    if (!trouble) {
      json.null();
      return;
    }
    json.begin_object()
        .key("code")
        .text(base::code_name(trouble->code()))
        .key("message")
        .text(trouble->what())
        .end_object();
  };
  Json json;
  json.begin_object().key("ok").boolean(sound).key("paths").begin_list();
  for (const Asked& asked : all) {
    json.begin_object().key("path").text(asked.path.string());
    add_problems(json, asked.problems, asked.trouble);
    json.key("files").begin_list();
    for (const FileCheck& file : asked.files) {
      json.begin_object().key("path").text(file.path.string()).key("bytes").number(file.size);
      json.key("tensors").number(
          static_cast<int64_t>(file.checkpoint ? file::Inside::of(*file.checkpoint).tensors.size() : 0));
      json.key("checksums").number(file.sums ? file.sums->known() : int64_t{0}).key("sha256");
      file.digest.empty() ? json.null() : json.text(file.digest);
      add_problems(json, file.problems, file.trouble);
      json.end_object();
    }
    json.end_list().end_object();
  }
  json.end_list().end_object();
  put(json.document() + "\n");
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
    asked.attempt([&] { find_files(asked, !options.manifest.empty()); });
    if (!options.manifest.empty() && !asked.trouble) asked.attempt([&] { plan_manifest(asked, options.manifest); });
  }
  check_all(all, options);
  for (Asked& asked : all) {
    compare_with_manifest(asked);
    if (asked.writes) write_if_sound(asked);
  }
  const int status = status_of(all);
  options.json ? print_json(all, status == 0) : print_text(all);
  return status;
}

}  // namespace

void add_verify(CLI::App& app, Action& chosen) {
  std::shared_ptr<VerifyOptions> options;
  CLI::App& verb =
      add_verb(app, chosen, "verify",
               "Check files: headers by every rule, indexes, tensors by their checksums, whole files by a manifest",
               verify, options);
  verb.add_option("PATH", options->paths, "files or directories")->required();
  verb.add_flag("--manifest{auto}", options->manifest,
                "whole files by SHA-256, also those of other tools, which have no checksums: against FILE.sha256, or "
                "SHA256SUMS in a directory. "
                "Where there "
                "is none it is written, if all else is well. --manifest=check: it must be there; --manifest=write: "
                "anew. sha256sum -c reads it")
      ->check(CLI::IsMember({"auto", "check", "write"}))
      ->option_text("[=check|write]");
  add_threads(verb, options->threads);
  add_json(verb, options->json);
  add_examples(verb, {{"One file, or all of a directory", "shardow verify run/ema.safetensors run/step-000001000"},
                      {"A download: written the first time, checked from then on", "shardow verify --manifest model"},
                      {"The same by other tools", "cd model && sha256sum -c SHA256SUMS"}});
}

}  // namespace shardow::cli

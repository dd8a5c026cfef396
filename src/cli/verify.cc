// Are these files what was written? Headers by every rule, indexes against files, tensors against their checksums.
#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/files.h"
#include "base/paths.h"
#include "cli/app.h"
#include "cli/exit_status.h"
#include "cli/lanes.h"
#include "cli/sources.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "file/catalog.h"
#include "file/crc.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"

namespace shardow::cli {
namespace {

namespace fs = std::filesystem;

/// A path that was looked at, and the result.
struct Checked {
  fs::path path;
  std::vector<std::string> problems = {};  ///< what is wrong with it
  std::optional<Error> trouble = {};       ///< why it could not be read

  /// Does work that may find the path wrong, or impossible to read. `named`: as a file of ours.
  template <class Work>
  void attempt(const Work& work, bool named = false) {
    try {
      work();
    } catch (const Error& error) {
      if (error.code() != Code::kCorrupt && !(error.code() == Code::kUnsupported && named)) {
        if (!trouble) trouble = error;
        return;
      }
      const std::string text = error.what(), front = path.string() + ": ";  // which stands there already
      problems.push_back(text.starts_with(front) ? text.substr(front.size()) : text);
    }
  }
};

struct FileCheck : Checked {
  std::optional<Checkpoint> checkpoint = {};  ///< what could not be opened has none
  int64_t size = 0;                           ///< bytes
  int64_t known = 0;                          ///< tensors whose checksum the header has

  const file::Catalog& catalog() const { return file::Inside::of(*checkpoint); }
  file::Opened& opened() const { return *catalog().files.at(0).file; }
};

/// One path of the command line.
struct Asked : Checked {
  std::vector<FileCheck> files = {};  ///< a directory's problems are those of its index
};

constexpr int64_t kReadBytes = 256 << 10;  // worked on while they are in the cache
constexpr int64_t kPieceBytes = 4 << 20;   // read by one lane from front to end

/// A tensor that has a checksum, and what its bytes add up to.
struct TensorCheck {
  FileCheck& file;
  const file::Stored& stored;
  uint32_t crc = 0;  ///< changed through std::atomic_ref

  int64_t bytes() const noexcept { return stored.entry.end - stored.entry.begin; }
};

struct Piece {
  TensorCheck* tensor;
  int64_t begin, end;  // bytes of the tensor
};

/// Calls read(bytes) for what was read of a piece.
template <class Read>
void check_piece(const Piece& piece, const Read& read) {
  const auto& [file, stored, sum_by_now] = *piece.tensor;
  std::vector<std::byte> memory;
  const auto handle = file.opened().handle();
  const int64_t first = file.catalog().files[0].data_begin + stored.entry.begin;
  for (int64_t begin = piece.begin; begin < piece.end; begin += kReadBytes) {
    check_interrupted();
    memory.resize(static_cast<size_t>(std::min(kReadBytes, piece.end - begin)));
    handle->read(memory, first + begin);
    const auto size = static_cast<int64_t>(memory.size());
    const uint32_t sum = file::crc32_contribution(file::crc32(0, memory), piece.tensor->bytes() - begin - size);
    std::atomic_ref(piece.tensor->crc).fetch_xor(sum);
    read(size);
  }
}

/// Reads the tensors that have checksums, on `lanes` threads. A CRC is linear: lanes add up what they have read in any
/// order.
void run_checks(std::vector<Asked>& all, int lanes) {
  std::deque<TensorCheck> tensors;
  std::vector<Piece> pieces;
  int64_t total = 0;
  for (Asked& asked : all) {
    for (FileCheck& file : asked.files) {
      if (!file.checkpoint) continue;
      for (const file::Stored& stored : file.catalog().tensors) {
        if (!stored.crc) continue;
        ++file.known;
        tensors.push_back({file, stored});
        TensorCheck& tensor = tensors.back();
        for (int64_t begin = 0; begin < tensor.bytes(); begin += kPieceBytes)
          pieces.push_back({&tensor, begin, std::min(begin + kPieceBytes, tensor.bytes())});
        total += tensor.bytes();
      }
    }
  }
  ProgressLine line("verify");
  std::atomic<int64_t> done{0};
  base::Mutex mutex;
  in_lanes(static_cast<int64_t>(pieces.size()), lanes, [&](int64_t number, int lane) {
    const Piece& piece = pieces[static_cast<size_t>(number)];
    try {
      check_piece(piece, [&](int64_t bytes) {
        done += bytes;
        if (lane == 0) line.tell(done, total);
      });
    } catch (const Error& error) {  // the other files are read all the same
      const base::Lock lock(mutex);
      if (!piece.tensor->file.trouble) piece.tensor->file.trouble = error;
    }
  });
  for (Asked& asked : all) {
    for (FileCheck& file : asked.files) {
      if (file.checkpoint && !file.trouble) file.attempt([&] { file.opened().check_unchanged(); });
    }
  }
  for (const auto& [file, stored, crc] : tensors) {
    if (!file.trouble && crc != *stored.crc)
      file.problems.push_back(fmt::format("'{}': its bytes have the CRC-32 {:08x}, the header says {:08x}",
                                          stored.entry.name, crc, *stored.crc));
  }
}

struct VerifyOptions {
  std::vector<std::string> paths;
  int threads = 0;
  bool json = false;
};

void add_file(Asked& asked, const fs::path& path) {
  FileCheck& file = asked.files.emplace_back(FileCheck{{path}});
  file.attempt(
      [&] {
        file.checkpoint = open_checkpoint(path);
        file.size = file.opened().handle()->size();
      },
      path.extension() == ".safetensors");
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
  const std::string tensors = counted(file.catalog().tensors.size(), "tensor");
  const std::string text = file.known == 0 ? fmt::format("header of {}, which has no checksums", tensors)
                                           : fmt::format("{} of {} by their checksums", file.known, tensors);
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
                         {"tensors", file.checkpoint ? file.catalog().tensors.size() : 0},
                         {"checksums", file.known},
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

/// The first trouble is the status of all; else 1 where something is wrong.
int status_of(const std::vector<Asked>& all) {
  bool sound = true;
  std::optional<Error> first;
  const auto look = [&](const Checked& checked) {
    sound &= checked.problems.empty();
    if (!checked.trouble) return;
    complain(shown(checked.trouble->what()));
    if (!first) first = checked.trouble;
  };
  for (const Asked& asked : all) {
    look(asked);
    std::for_each(asked.files.begin(), asked.files.end(), look);
  }
  return first ? base::exit_code(first->code()) : sound ? 0 : kDifferent;
}

int verify(const VerifyOptions& options) {
  std::vector<Asked> all;
  for (const std::string& path : options.paths) {
    Asked& asked = all.emplace_back(Asked{{path}});
    asked.attempt([&] { find_files(asked); });
  }
  run_checks(all, options.threads);
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

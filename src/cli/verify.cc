// Are these files what was written? Headers by every rule, indexes against files, tensors against their checksums.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
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

/// The CRC-32 of every tensor of a file, of parts in any order. Any threads at once.
class TensorSums {
 public:
  explicit TensorSums(const Checkpoint& file) : data_begin_(file::Inside::of(file).files.at(0).data_begin) {
    for (const file::Stored& stored : file::Inside::of(file).tensors) {
      tensors_.push_back(&stored);
      if (stored.crc) ++known_;
    }
    std::sort(tensors_.begin(), tensors_.end(), [](const auto* a, const auto* b) {
      return std::pair(a->entry.begin, a->entry.end) < std::pair(b->entry.begin, b->entry.end);
    });
    sums_ = std::make_unique<std::atomic<uint32_t>[]>(tensors_.size());
  }

  int64_t known() const noexcept { return known_; }  ///< tensors whose checksum the header has
  int64_t data_begin() const noexcept { return data_begin_; }

  /// `offset`: of the file.
  void add(int64_t offset, std::span<const std::byte> bytes) {
    const int64_t begin = offset - data_begin_, end = begin + static_cast<int64_t>(bytes.size());
    auto at = std::upper_bound(tensors_.begin(), tensors_.end(), begin,
                               [](int64_t b, const auto* one) { return b < one->entry.end; });
    for (; at != tensors_.end() && (*at)->entry.begin < end; ++at) {
      const file::Entry& entry = (*at)->entry;
      const int64_t from = std::max(begin, entry.begin), until = std::min(end, entry.end);
      if (!(*at)->crc || from >= until) continue;
      const uint32_t crc =
          file::crc32(0, bytes.subspan(static_cast<size_t>(from - begin), static_cast<size_t>(until - from)));
      sums_[static_cast<size_t>(at - tensors_.begin())] ^= file::crc32_contribution(crc, entry.end - until);
    }
  }

  /// When all was added.
  std::vector<std::string> problems() const {
    std::vector<std::string> found;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto& [file, entry, crc] = *tensors_[i];
      if (crc && *crc != sums_[i])
        found.push_back(fmt::format("'{}': its bytes have the CRC-32 {:08x}, the header says {:08x}", entry.name,
                                    sums_[i].load(), *crc));
    }
    return found;
  }

 private:
  std::vector<const file::Stored*> tensors_;  // ascending, as they lie in the file
  std::unique_ptr<std::atomic<uint32_t>[]> sums_;
  int64_t data_begin_;
  int64_t known_ = 0;
};

/// One file to be read, and what became of it.
struct FileCheck {
  std::filesystem::path path;
  std::optional<Checkpoint> checkpoint;  ///< what could not be opened has none

  std::unique_ptr<TensorSums> sums;
  int64_t size = 0;                   ///< bytes
  std::vector<std::string> problems;  ///< what is wrong with it
  std::optional<Error> trouble;       ///< why it could not be read
};

constexpr int64_t kReadBytes = 256 << 10;  // worked on while they are in the cache
constexpr int64_t kPieceBytes = 4 << 20;   // read by one lane from front to end

struct Piece {
  FileCheck* file;
  int64_t begin, end;  // bytes of the file
};

std::vector<Piece> pieces_of(std::vector<FileCheck>& files) {
  std::vector<Piece> pieces;
  for (FileCheck& file : files) {
    if (file.trouble || !file.sums || file.sums->known() == 0) continue;
    for (int64_t begin = file.sums->data_begin(); begin < file.size; begin += kPieceBytes)
      pieces.push_back({&file, begin, std::min(begin + kPieceBytes, file.size)});
  }
  return pieces;
}

std::shared_ptr<const base::File> handle_of(const FileCheck& file) {
  return file::Inside::of(*file.checkpoint).files[0].file->handle();
}

void prepare(FileCheck& file) {
  if (!file.checkpoint) return;
  try {
    file.size = handle_of(file)->size();
    file.sums = std::make_unique<TensorSums>(*file.checkpoint);
  } catch (const Error& error) {
    file.trouble = error;
  }
}

void finish(FileCheck& file) {
  if (file.trouble || !file.checkpoint) return;
  try {
    file::Inside::of(*file.checkpoint).files[0].file->check_unchanged();
  } catch (const Error& error) {
    file.trouble = error;
    return;
  }
  if (!file.sums || file.sums->known() == 0) return;
  std::vector<std::string> problems = file.sums->problems();
  file.problems.insert(file.problems.end(), problems.begin(), problems.end());
}

std::span<const std::byte> read(const base::File& file, int64_t begin, int64_t bytes, std::vector<std::byte>& buffer) {
  buffer.resize(kReadBytes);
  const auto room = std::span(buffer).first(static_cast<size_t>(bytes));
  file.read(room, begin);
  return room;
}

/// Reads the tensors of files that have checksums, on `lanes` threads. A CRC is linear: lanes add up what they have
/// read in any order.
void run_checks(std::vector<FileCheck>& files, int lanes,
                const std::function<void(int64_t done, int64_t total)>& told) {
  for (FileCheck& file : files) prepare(file);
  const std::vector<Piece> pieces = pieces_of(files);
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.end - piece.begin;
  std::atomic<int64_t> done{0};
  base::Mutex mutex;
  std::vector<std::vector<std::byte>> memory(static_cast<size_t>(lanes));
  const auto work = [&](int64_t number, int lane) {
    const auto& [file, begin, end] = pieces[static_cast<size_t>(number)];
    std::vector<std::byte>& buffer = memory[static_cast<size_t>(lane)];
    try {
      const auto handle = handle_of(*file);
      for (int64_t at = begin; at < end; at += kReadBytes) {
        check_interrupted();
        const int64_t size = std::min(kReadBytes, end - at);
        file->sums->add(at, read(*handle, at, size, buffer));
        done += size;
        if (lane == 0) told(done, total);
      }
    } catch (const Error& error) {  // the other files are read all the same
      const base::Lock lock(mutex);
      if (!file->trouble) file->trouble = error;
    }
  };
  in_lanes(static_cast<int64_t>(pieces.size()), lanes, work);
  for (FileCheck& file : files) finish(file);
}

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

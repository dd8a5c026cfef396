// A CRC is linear: lanes add up what they have read in any order.
#include "cli/checks.h"

#include <algorithm>
#include <map>

#include "base/errors.h"
#include "base/files.h"
#include "cli/lanes.h"
#include "file/crc.h"

namespace shardow::cli {
namespace {

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

}  // namespace

TensorSums::TensorSums(const Checkpoint& file) : data_begin_(file::Inside::of(file).files.at(0).data_begin) {
  for (const file::Stored& stored : file::Inside::of(file).tensors) {
    tensors_.push_back(&stored);
    if (stored.crc) ++known_;
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const auto* a, const auto* b) {
    return std::pair(a->entry.begin, a->entry.end) < std::pair(b->entry.begin, b->entry.end);
  });
  sums_ = std::make_unique<std::atomic<uint32_t>[]>(tensors_.size());
}

void TensorSums::add(int64_t offset, std::span<const std::byte> bytes) {
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

std::vector<std::string> TensorSums::problems() const {
  std::vector<std::string> found;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& [file, entry, crc] = *tensors_[i];
    if (crc && *crc != sums_[i])
      found.push_back(fmt::format("'{}': its bytes have the CRC-32 {:08x}, the header says {:08x}", entry.name,
                                  sums_[i].load(), *crc));
  }
  return found;
}

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

}  // namespace shardow::cli

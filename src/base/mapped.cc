// Reading from the page cache costs a copy of every byte; mapping it costs a fault for a few dozen pages. Where pages
// have to come from a disk first, reads are better: the kernel knows how much is wanted at once.
#include "base/mapped.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

namespace shardow::base {
namespace {

#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;  // Linux 5.14; others answer EINVAL
#endif

constexpr size_t kTogether = size_t{1} << 20;  // bytes that are forgotten at once

const uintptr_t kPageBytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));

/// The pages that bytes lie in.
std::span<std::byte> pages_of(std::span<std::byte> bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()), end = begin + bytes.size();
  const uintptr_t first = begin / kPageBytes * kPageBytes, last = (end + kPageBytes - 1) / kPageBytes * kPageBytes;
  return {bytes.data() - (begin - first), last - first};
}

bool is_in_memory(std::byte* page) {
  unsigned char told = 0;
  return ::mincore(page, kPageBytes, &told) == 0 && (told & 1) != 0;
}

}  // namespace

Mapped::Mapped(const File& file) noexcept {
  struct stat found {};
  if (::fstat(file.fd_, &found) != 0 || found.st_size <= 0) return;
  const auto size = static_cast<size_t>(found.st_size);
  void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.fd_, 0);
  if (memory != MAP_FAILED) bytes_ = {static_cast<std::byte*>(memory), size};
}

Mapped::Mapped(Mapped&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Mapped::~Mapped() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

std::span<const std::byte> Mapped::look(int64_t begin, int64_t bytes) const noexcept {
  const auto from = static_cast<size_t>(begin), size = static_cast<size_t>(bytes);
  if (begin < 0 || bytes <= 0 || from > bytes_.size() || size > bytes_.size() - from) return {};
  const auto wanted = bytes_.subspan(from, size), pages = pages_of(wanted);
  if (!is_in_memory(pages.data()) || !is_in_memory(pages.data() + pages.size() - kPageBytes)) return {};
  if (::madvise(pages.data(), pages.size(), MADV_POPULATE_READ) != 0) return {};
  return wanted;
}

void Mapped::forget(std::span<const std::byte> looked_at) const noexcept {
  if (looked_at.empty()) return;
  const auto offset = static_cast<size_t>(looked_at.data() - bytes_.data());
  const auto pages = pages_of(bytes_.subspan(offset, looked_at.size()));
  ::madvise(pages.data(), pages.size(), MADV_DONTNEED);
}

void Forgetting::forget(const Mapped& of, std::span<const std::byte> looked_at) noexcept {
  if (looked_at.empty()) return;
  const bool goes_on = of_ == &of && bytes_.data() + bytes_.size() == looked_at.data();
  if (!goes_on) now();
  of_ = &of;
  bytes_ = goes_on ? std::span(bytes_.data(), bytes_.size() + looked_at.size()) : looked_at;
  if (bytes_.size() >= kTogether) now();
}

void Forgetting::now() noexcept {
  if (of_ != nullptr) of_->forget(bytes_);
  of_ = nullptr;
  bytes_ = {};
}

}  // namespace shardow::base

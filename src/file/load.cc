// What a load compares before it reads, and after.
#include "file/load.h"

#include <algorithm>
#include <chrono>

#include "base/errors.h"
#include "file/plan.h"
#include "file/reader.h"
#include "file/together.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using base::fail;
using Clock = std::chrono::steady_clock;

bool can_cast(DType from, DType to) {
  return from == to || (is_floating(from) && is_floating(to) && dtype_bits(from) >= 16 && dtype_bits(to) >= 16);
}

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 20;
  std::string out =
      fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kMost)), ", "));
  if (names.size() > kMost) out += fmt::format(" and {} more", names.size() - kMost);
  return out;
}

/// Everything that does not fit, in one message, before anything is read. The same on every rank.
LoadReport compare(const Catalog& catalog, const std::vector<Shared>& wanted, const LoadOptions& options) {
  LoadReport report;
  std::vector<std::string> unfit;
  for (const Shared& tensor : wanted) {
    const auto found = catalog.tensors.find(tensor.name);
    if (found == catalog.tensors.end()) {
      report.missing.push_back(tensor.name);
    } else if (found->second.entry.shape != tensor.shape) {
      unfit.push_back(fmt::format("'{}' has shape [{}] in the file and [{}] here", tensor.name, fmt::join(found->second.entry.shape, ", "),
                                  fmt::join(tensor.shape, ", ")));
    } else if (!can_cast(found->second.entry.dtype, tensor.dtype)) {
      unfit.push_back(
          fmt::format("'{}' is {} in the file and {} here", tensor.name, dtype_name(found->second.entry.dtype), dtype_name(tensor.dtype)));
    }
  }
  for (const auto& [name, stored] : catalog.tensors) {
    if (!find(wanted, name)) report.unexpected.push_back(name);
  }
  if (options.strict && !report.missing.empty()) unfit.push_back("missing in the file: " + listed(report.missing));
  if (options.strict && !report.unexpected.empty()) unfit.push_back("unexpected in the file: " + listed(report.unexpected));
  if (!unfit.empty()) fail(Code::kInvalidArgument, "{} does not fit, nothing was loaded: {}", catalog.path, fmt::join(unfit, "; "));
  report.metadata = catalog.metadata;
  return report;
}

/// Which tensors' checksums can be compared: those of which the ranks together read everything, each element counted by one rank.
std::vector<bool> verifiable(const Catalog& catalog, const std::vector<Shared>& wanted) {
  std::vector<bool> result;
  for (const Shared& tensor : wanted) {
    const auto found = catalog.tensors.find(tensor.name);
    result.push_back(found != catalog.tensors.end() && found->second.crc && covers_once(regions_of(tensor)));
  }
  return result;
}

std::vector<Reader::Job> jobs_for(int rank, std::span<const TensorView> views, const Catalog& catalog, const std::vector<Shared>& wanted,
                                  const std::vector<bool>& verified) {
  std::vector<Reader::Job> jobs;
  for (const TensorView& view : views) {
    const auto stored = catalog.tensors.find(view.name);
    if (stored == catalog.tensors.end()) continue;
    const size_t t = *find(wanted, view.name);
    const bool first = std::any_of(wanted[t].pieces.begin(), wanted[t].pieces.end(),
                                   [&](const Shared::Piece& p) { return p.holders[0] == rank && p.region == view.region; });
    jobs.push_back({&view, &stored->second, t, verified[t] && first});
  }
  return jobs;
}

void check_sums(const Catalog& catalog, const std::vector<Shared>& wanted, const std::vector<bool>& verified,
                const std::vector<uint64_t>& crcs) {
  std::vector<std::string> wrong;
  for (size_t t = 0; t < wanted.size(); ++t) {
    if (verified[t] && *catalog.tensors.at(wanted[t].name).crc != crcs[t]) wrong.push_back("'" + wanted[t].name + "'");
  }
  if (!wrong.empty()) {
    fail(Code::kCorrupt,
         "{}: the data of {} is not what was saved (checksums differ); the tensors that were loaded into hold it: load another checkpoint",
         catalog.path, listed(wrong));
  }
}

}  // namespace

LoadReport load_from(Group& group, std::span<const TensorView> views, const Catalog& catalog, const LoadOptions& options) {
  const auto begin = Clock::now();
  const std::chrono::milliseconds timeout = options.timeout;
  const std::vector<Shared> wanted = share(group, views, Clock::now() + timeout);
  LoadReport report = compare(catalog, wanted, options);
  if (options.check_only) return report;
  const std::vector<bool> verified = options.verify ? verifiable(catalog, wanted) : std::vector<bool>(wanted.size(), false);
  std::vector<Reader::Job> jobs = jobs_for(group.rank(), views, catalog, wanted, verified);
  uint64_t total = 0;
  for (const Reader::Job& job : jobs) total += static_cast<uint64_t>(job.view->region.size() * dtype_bits(job.stored->entry.dtype) / 8);
  group.all_reduce({&total, 1}, Group::Op::kSum, Clock::now() + timeout);
  Reader reader(catalog, std::move(jobs), wanted.size());
  Parts(group, timeout, static_cast<int64_t>(total), options.progress).run([&] { return reader.part(); });
  if (options.verify) group.all_reduce(reader.crcs(), Group::Op::kXor, Clock::now() + timeout);
  check_sums(catalog, wanted, verified, reader.crcs());
  report.bytes_read = reader.bytes();
  report.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return report;
}

}  // namespace file

LoadReport load(Group& group, std::span<const TensorView> views, const std::filesystem::path& path, const LoadOptions& options) {
  return file::load_from(group, views, file::share_catalog(group, path, options.timeout), options);
}

}  // namespace shardow

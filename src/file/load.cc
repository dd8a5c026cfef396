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

/// Why what is in the file does not go into such a tensor; empty where it does.
std::string difference(const Entry& entry, const Shape& shape, DType dtype) {
  if (entry.shape != shape)
    return fmt::format("'{}' has shape [{}] in the file and [{}] here", entry.name, fmt::join(entry.shape, ", "), fmt::join(shape, ", "));
  if (!can_cast(entry.dtype, dtype))
    return fmt::format("'{}' is {} in the file and {} here", entry.name, dtype_name(entry.dtype), dtype_name(dtype));
  return {};
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
    } else if (std::string why = difference(found->second.entry, tensor.shape, tensor.dtype); !why.empty()) {
      unfit.push_back(std::move(why));
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

/// What the ranks find out about the bytes that they read: the checksum of every tensor, from one holder of each piece, and of every piece
/// with several holders the first one's part of it, with which the others compare their own.
class Sums {
 public:
  Sums(const Catalog& catalog, const std::vector<Shared>& wanted)
      : catalog_(catalog), wanted_(wanted), verified_(verifiable(catalog, wanted)) {
    for (size_t t = 0; t < wanted.size(); ++t) {
      replicas_.emplace_back(wanted[t].pieces.size());
      for (size_t p = 0; verified_[t] && p < wanted[t].pieces.size(); ++p) {
        if (wanted[t].pieces[p].holders.size() > 1) replicas_[t][p] = wanted.size() + num_replicas_++;
      }
    }
  }

  bool of(size_t tensor) const { return verified_[tensor]; }

  /// `tensors` and `sums`: of this rank's jobs. Collective.
  void check(Group& group, std::chrono::milliseconds timeout, std::span<const Reader::Job> jobs, const std::vector<uint64_t>& sums) {
    std::vector<uint64_t> all(wanted_.size() + num_replicas_, 0);
    std::vector<std::string> wrong;
    for_each(jobs, [&](size_t j, size_t t, size_t p) {
      if (wanted_[t].pieces[p].holders[0] != group.rank()) return;
      all[t] ^= sums[j];
      if (replicas_[t][p]) all[*replicas_[t][p]] = sums[j];
    });
    group.all_reduce(all, Group::Op::kXor, Clock::now() + timeout);
    for (size_t t = 0; t < wanted_.size(); ++t) {
      if (verified_[t] && *catalog_.tensors.at(wanted_[t].name).crc != all[t]) wrong.push_back("'" + wanted_[t].name + "'");
    }
    if (!wrong.empty()) fail_changed(wrong);
    if (num_replicas_ == 0) return;
    together(group, timeout, [&] {
      for_each(jobs, [&](size_t j, size_t t, size_t p) {
        if (replicas_[t][p] && all[*replicas_[t][p]] != sums[j]) wrong.push_back("'" + wanted_[t].name + "'");
      });
      if (!wrong.empty()) fail_changed(wrong);
    });
  }

 private:
  /// Calls fn(job, tensor, piece).
  template <class Fn>
  void for_each(std::span<const Reader::Job> jobs, Fn fn) const {
    for (size_t j = 0; j < jobs.size(); ++j) {
      const size_t t = *find(wanted_, jobs[j].view->name);
      if (!verified_[t]) continue;
      const auto& pieces = wanted_[t].pieces;
      const auto piece =
          std::find_if(pieces.begin(), pieces.end(), [&](const Shared::Piece& p) { return p.region == jobs[j].view->region; });
      if (piece != pieces.end()) fn(j, t, static_cast<size_t>(piece - pieces.begin()));
    }
  }

  [[noreturn]] void fail_changed(const std::vector<std::string>& names) const {
    fail(Code::kCorrupt,
         "{}: the data of {} is not what was saved (checksums differ); the tensors that were loaded into hold it: load another checkpoint",
         catalog_.path, listed(names));
  }

  const Catalog& catalog_;
  const std::vector<Shared>& wanted_;
  const std::vector<bool> verified_;
  std::vector<std::vector<std::optional<size_t>>> replicas_;  // by tensor and piece: where its sum lies behind those of the tensors
  size_t num_replicas_ = 0;
};

}  // namespace

LoadReport load_from(Group& group, std::span<const TensorView> views, const Catalog& catalog, const LoadOptions& options) {
  const auto begin = Clock::now();
  const std::chrono::milliseconds timeout = options.timeout;
  const std::vector<Shared> wanted = share(group, views, Clock::now() + timeout);
  LoadReport report = compare(catalog, wanted, options);
  if (options.check_only) return report;
  std::optional<Sums> sums;
  if (options.verify) sums.emplace(catalog, wanted);
  std::vector<Reader::Job> jobs;
  uint64_t total = 0;
  for (const TensorView& view : views) {
    const auto stored = catalog.tensors.find(view.name);
    if (stored == catalog.tensors.end()) continue;
    jobs.push_back({&view, &stored->second, sums && sums->of(*find(wanted, view.name))});
    total += static_cast<uint64_t>(view.region.size() * dtype_bits(stored->second.entry.dtype) / 8);
  }
  group.all_reduce({&total, 1}, Group::Op::kSum, Clock::now() + timeout);
  Reader reader(catalog, jobs);
  Parts parts(group, timeout, static_cast<int64_t>(total), options.progress);
  parts.run([&] { return reader.part(); });
  together(group, timeout, [&] { parts.tell(); });
  if (sums) sums->check(group, timeout, jobs, reader.sums());
  report.bytes_read = reader.bytes();
  report.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return report;
}

void read_one(const Catalog& catalog, const TensorView& view) {
  const auto found = catalog.tensors.find(view.name);
  if (found == catalog.tensors.end()) fail(Code::kNotFound, "{} has no tensor '{}'", catalog.path, view.name);
  if (const std::string why = difference(found->second.entry, view.region.shape(), view.dtype); !why.empty())
    fail(Code::kInvalidArgument, "{}: {}", catalog.path, why);
  const bool whole = view.region == Region::whole(view.region.shape());
  Reader reader(catalog, {{&view, &found->second, whole && found->second.crc}});
  while (!reader.part().last) continue;
  if (whole && found->second.crc && *found->second.crc != reader.sums()[0]) {
    fail(Code::kCorrupt, "{}: the data of '{}' is not what was saved (checksums differ): read another checkpoint", catalog.path, view.name);
  }
}

}  // namespace file

LoadReport load(Group& group, std::span<const TensorView> views, const std::filesystem::path& path, const LoadOptions& options) {
  return file::load_from(group, views, file::share_catalog(group, path, options.timeout), options);
}

}  // namespace shardow

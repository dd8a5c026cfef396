// What a load compares before it reads, and after.
#include "file/load.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/turns.h"
#include "comm/agree.h"
#include "comm/parts.h"
#include "comm/wire.h"
#include "file/call.h"
#include "file/environment.h"
#include "file/ownership.h"
#include "file/reader.h"
#include "file/sharing.h"
#include "file/sums.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using base::fail;
using comm::Receiver;
using comm::Sender;

bool can_cast(DType from, DType to) {
  return from == to || (is_floating(from) && is_floating(to) && dtype_bits(from) >= 16 && dtype_bits(to) >= 16);
}

/// Why what is in the file does not go into such a tensor; empty where it does.
std::string difference(const Entry& entry, const Shape& shape, DType dtype) {
  if (entry.shape != shape)
    return fmt::format("'{}' has shape [{}] in the file and [{}] here", entry.name, fmt::join(entry.shape, ", "),
                       fmt::join(shape, ", "));
  if (!can_cast(entry.dtype, dtype))
    return fmt::format("'{}' is {} in the file and {} here", entry.name, dtype_name(entry.dtype), dtype_name(dtype));
  return {};
}

/// Both have their tensors in the order of names.
Wanted wanted_of(const Catalog& catalog, std::vector<Shared> tensors, std::string told, std::string said) {
  Wanted wanted{std::move(told), std::move(said), std::move(tensors), {}, {}};
  wanted.there.resize(wanted.tensors.size());
  size_t at = 0;
  for (const Stored& stored : catalog.tensors) {
    int order = -1;  // of the wanted one beside this one
    while (at < wanted.tensors.size() && (order = wanted.tensors[at].name.compare(stored.entry.name)) < 0) ++at;
    if (at < wanted.tensors.size() && order == 0) {
      wanted.there[at] = &stored;
    } else {
      wanted.unexpected.push_back(stored.entry.name);
    }
  }
  return wanted;
}

/// Everything that does not fit, in one message, before anything is read. The same on every rank.
LoadReport compare(const Catalog& catalog, const Wanted& wanted, const LoadOptions& options) {
  LoadReport report;
  std::vector<std::string> unfit;
  for (size_t i = 0; i < wanted.tensors.size(); ++i) {
    const Shared& tensor = wanted.tensors[i];
    if (wanted.there[i] == nullptr) {
      report.missing.push_back(tensor.name);
    } else if (std::string why = difference(wanted.there[i]->entry, tensor.shape, tensor.dtype); !why.empty()) {
      unfit.push_back(std::move(why));
    }
  }
  report.unexpected = wanted.unexpected;
  if (options.strict && !report.missing.empty()) unfit.push_back("missing in the file: " + listed(report.missing));
  if (options.strict && !report.unexpected.empty())
    unfit.push_back("unexpected in the file: " + listed(report.unexpected));
  if (!unfit.empty())
    fail(Code::kInvalidArgument, "{} does not fit, nothing was loaded: {}", catalog.path, fmt::join(unfit, "; "));
  report.metadata = catalog.metadata();
  return report;
}

/// What a rank asks for, for all ranks: what one of them asks for, all do.
constexpr int64_t kStrict = 1, kVerify = 2, kCheckOnly = 4, kProgress = 8;

/// What a rank says: what it asks for, and what it holds.
std::string words_of(int64_t asked, const std::string& held) {
  Sender out;
  out.number(asked);
  return out.bytes() + held;
}

int64_t asked_by(const LoadOptions& options) {
  return (options.strict ? kStrict : 0) | (options.verify ? kVerify : 0) | (options.check_only ? kCheckOnly : 0) |
         (options.progress ? kProgress : 0);
}

/// Everybody's: what is asked for, and who holds what.
std::string sum_up_words(const std::vector<std::string>& words) {
  int64_t asked = 0;
  std::vector<std::string> held;
  for (const std::string& one : words) {
    asked |= Receiver(one).number();
    held.push_back(one.substr(sizeof(int64_t)));
  }
  return words_of(asked, sum_up(held));
}

/// Bytes that all ranks together will read, as they are in the file.
int64_t bytes_in_all(const Wanted& wanted) {
  int64_t total = 0;
  for (size_t i = 0; i < wanted.tensors.size(); ++i) {
    if (wanted.there[i] == nullptr) continue;
    for (const Shared::Piece& piece : wanted.tensors[i].pieces)
      total += piece.region.size() * dtype_bits(wanted.there[i]->entry.dtype) / 8 *
               static_cast<int64_t>(piece.holders.size());
  }
  return total;
}

std::vector<Reader::Job> jobs_of(std::span<const TensorView> views, const Wanted& wanted,
                                 const std::optional<Sums>& sums) {
  std::vector<Reader::Job> jobs;
  jobs.reserve(views.size());
  Finder finder(wanted.tensors);
  for (const TensorView& view : views) {
    const size_t at = finder.find(view.name).value();
    if (wanted.there[at] != nullptr) jobs.push_back({&view, wanted.there[at], sums && sums->of(at), at});
  }
  return jobs;
}

/// What every rank has said is known: it fits, or throws the same on all ranks; then each reads its own. One step, if
/// all are done within the time of a part. `mine`: of the views, made where it is missing.
LoadReport load_agreed(Group& group, std::span<const TensorView> views, const Catalog& catalog,
                       std::optional<Holding>& mine, const std::string& said, LoadOptions options,
                       std::optional<Wanted>& wanted) {
  const auto begin = base::now();
  const int64_t asked = Receiver(said).number();
  if (std::string held = said.substr(sizeof(int64_t)); !wanted || wanted->said != held) {
    if (!mine) mine.emplace(views);
    wanted = wanted_of(catalog, shared_from(group, *mine, held, options.timeout), mine->words(), held);
  }
  options.strict = (asked & kStrict) != 0;
  LoadReport report = compare(catalog, *wanted, options);
  if ((asked & kCheckOnly) != 0) return report;
  std::optional<Sums> sums;
  if ((asked & kVerify) != 0) sums.emplace(catalog.path, wanted->tensors, wanted->there);
  const std::vector<Reader::Job> jobs = jobs_of(views, *wanted, sums);
  Reader reader(catalog, jobs);
  comm::Parts parts(group, options.timeout, bytes_in_all(*wanted), options.progress);
  parts.run([&] { return reader.part(); });
  if ((asked & kProgress) != 0 || sums) {
    const auto tell = [&] {
      parts.tell();
      return sums ? sums->words(group.rank(), jobs, reader.sums()) : std::string();
    };
    const auto check = [&](const std::vector<std::string>& everybody) {
      if (sums) sums->compare(everybody);
      return std::string();
    };
    comm::agree_on(group, base::after(options.timeout), tell, check);
  }
  report.bytes_read = reader.bytes();
  report.seconds = base::seconds_since(begin);
  return report;
}

/// What was opened through timed calls, for whoever keeps it: the catalog goes first.
using KeptOpen = std::pair<std::shared_ptr<base::TimedCalls>, std::shared_ptr<const Catalog>>;

}  // namespace

LoadReport load_from(Group& group, std::span<const TensorView> views, const Catalog& catalog,
                     const LoadOptions& options, std::optional<Wanted>* kept) {
  const auto begin = base::now();
  check_memory(views);
  std::optional<Wanted> own;
  std::optional<Wanted>& wanted = kept != nullptr ? *kept : own;
  std::optional<Holding> mine;
  if (!wanted) mine.emplace(views);
  const std::string told = words_of(asked_by(options), wanted ? wanted->told : mine->words());
  const auto decide = [](const auto& words) { return Group::Decision{sum_up_words(words)}; };
  const std::string said = group.decide(told, decide, base::after(options.timeout)).common;
  LoadReport report = load_agreed(group, views, catalog, mine, said, options, wanted);
  report.seconds = base::seconds_since(begin);
  return report;
}

LoadReport load_chosen(Group& group, const base::Path& path, const Choose& choose, LoadOptions options) {
  const auto begin = base::now();
  const std::shared_ptr<base::TimedCalls> timed = timed_calls(group, options.timeout);
  const Environment machine{timed.get()};
  const InEnvironment here(&machine);
  Chosen chosen;
  std::optional<Holding> mine;
  const auto told = [&](const std::shared_ptr<const Catalog>& catalog) {
    const auto kept = std::make_shared<const KeptOpen>(timed, catalog);
    chosen = choose({kept, catalog.get()});
    options.strict = chosen.strict;
    check_memory(chosen.views);
    mine.emplace(chosen.views);
    return words_of(asked_by(options), mine->words());
  };
  const Discussed found = discuss_catalog(group, path, options.timeout, told, sum_up_words);
  std::optional<Wanted> wanted;
  LoadReport report = load_agreed(group, chosen.views, *found.catalog, mine, found.said, options, wanted);
  report.seconds = base::seconds_since(begin);
  return report;
}

void read_one(const Catalog& catalog, const TensorView& view) {
  const Stored& stored = catalog.find(view.name);
  if (const std::string why = difference(stored.entry, view.region.shape(), view.dtype); !why.empty())
    fail(Code::kInvalidArgument, "{}: {}", catalog.path, why);
  const bool summed = stored.crc && view.region == Region::whole(view.region.shape());
  Reader reader(catalog, {{&view, &stored, summed}});
  while (!reader.part().last) continue;
  if (summed && *stored.crc != reader.sums()[0]) {
    fail(Code::kCorrupt, "{}: the data of '{}' is not what was saved (checksums differ): read another checkpoint",
         catalog.path, view.name);
  }
}

}  // namespace file

LoadReport load(Group& group, std::span<const TensorView> views, const std::filesystem::path& path,
                const LoadOptions& options) {
  group.begin("load()", options.timeout);
  const auto all = [&](const auto&) { return file::Chosen{{views.begin(), views.end()}, options.strict}; };
  return file::load_chosen(group, path, all, options);
}

}  // namespace shardow

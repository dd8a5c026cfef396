// What a load compares before it reads, and after.
#include "file/load.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/turns.h"
#include "file/ownership.h"
#include "file/reader.h"
#include "file/save_request.h"
#include "file/sharing.h"
#include "file/sums.h"
#include "file/timed.h"
#include "group/agree.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using base::fail;

bool can_cast(DType from, DType to) {
  return from == to || (is_floating(from) && is_floating(to) && dtype_bits(from) >= 16 && dtype_bits(to) >= 16);
}

/// Why what is in a place does not go into such a tensor; empty where it does.
std::string difference(const Entry& entry, const Shape& shape, DType dtype, const char* place) {
  if (entry.shape != shape)
    return fmt::format("'{}' has shape [{}] in {} and [{}] here", entry.name, fmt::join(entry.shape, ", "), place,
                       fmt::join(shape, ", "));
  if (!can_cast(entry.dtype, dtype))
    return fmt::format("'{}' is {} in {} and {} here", entry.name, dtype_name(entry.dtype), place, dtype_name(dtype));
  return {};
}

/// One file's part of a load.
struct Filling {
  const std::shared_ptr<const Catalog> catalog;
  const std::vector<TensorView> views;
  Asked strict;
  SharedTensors wanted;                    ///< by all ranks
  std::vector<const Stored*> stored = {};  ///< of each, or null
  std::optional<Sums> sums = {};
  std::vector<Reader::Job> jobs = {};
  std::optional<Reader> reader = {};  ///< while there is something to read
  int64_t bytes_read = 0;

  Filling(std::shared_ptr<const Catalog> where, Chosen chosen, int rank)
      : catalog(std::move(where)),
        views(std::move(chosen.views)),
        strict(chosen.strict ? kStrict : 0),
        wanted(views, rank) {}
  int64_t bytes_in_all() const;
  group::Part part(int rank, bool verify);
};

/// Bytes that all ranks together will read, as they are in the file.
int64_t Filling::bytes_in_all() const {
  int64_t total = 0;
  for (size_t i = 0; i < wanted.all.size(); ++i) {
    if (stored[i] == nullptr) continue;
    for (const Shared::Piece& piece : wanted.all[i].pieces)
      total +=
          piece.region.size() * dtype_bits(stored[i]->entry.dtype) / 8 * static_cast<int64_t>(piece.holders.size());
  }
  return total;
}

group::Part Filling::part(int rank, bool verify) {
  if (!reader) {
    if (verify) sums.emplace(catalog->path, wanted.all, stored);
    Finder finder(wanted.all);
    for (const TensorView& view : views) {
      const size_t at = finder.find(view.name).value();
      if (stored[at] != nullptr) jobs.push_back({&view, stored[at], sums && sums->of(at), at});
    }
    reader.emplace(*catalog, jobs);
  }
  const group::Part part = reader->part();
  if (part.last) {
    bytes_read = reader->bytes();
    if (sums) sums->add(rank, jobs, reader->sums());
    reader.reset();
  }
  return part;
}

using Fillings = std::deque<Filling>;

/// Checks that what all ranks want fits, or throws the same on all; then each rank reads its own. Takes one step, if
/// all are done within the time of a part.
std::vector<LoadReport> load_agreed(group::CollectiveCall& ranks, Fillings& fillings, const Asked& asked,
                                    const LoadCall& call) {
  std::vector<LoadReport> reports;
  int64_t total = 0;
  for (Filling& filling : fillings) {
    Match fit = match(filling.wanted.all, filling.catalog->tensors, filling.strict.has(kStrict), filling.catalog->path,
                      "the file");
    filling.stored = std::move(fit.stored);
    fit.report.metadata = filling.catalog->metadata();
    reports.push_back(std::move(fit.report));
    total += filling.bytes_in_all();
  }
  if (asked.has(kCheckOnly)) return reports;
  auto next = fillings.begin();
  bool begun = false;
  const auto part = [&] {
    if (!std::exchange(begun, true) && call.begin) call.begin(reports);
    group::Part all{0, false};
    for (const group::PartTime time; next != fillings.end() && !time.over();) {
      const group::Part one = next->part(ranks.rank(), asked.has(kVerify));
      all.bytes += one.bytes;
      if (one.last) ++next;
    }
    return group::Part{all.bytes, next == fillings.end()};
  };
  ranks.work(total, part, [&] {
    if (call.end) call.end();
    group::Comparisons sums;
    for (Filling& filling : fillings) {
      if (filling.sums) sums.push_back(&*filling.sums);
    }
    return sums;
  });
  if (asked.has(kProgress)) agree(ranks.group(), ranks.deadline(), [&] { ranks.tell_progress(); });
  for (size_t f = 0; f < reports.size(); ++f) reports[f].bytes_read = fillings[f].bytes_read;
  return reports;
}

/// What was opened through timed calls, for whoever keeps it: the catalog goes first.
using KeptOpen = std::pair<std::shared_ptr<base::TimedCalls>, std::shared_ptr<const Catalog>>;

}  // namespace

Asked::Asked(const LoadOptions& options)
    : bits((options.strict ? kStrict : 0) | (options.verify ? kVerify : 0) | (options.check_only ? kCheckOnly : 0) |
           (options.progress ? kProgress : 0)) {}

std::string Asked::sum_up(const std::vector<std::string>& by_rank) const {
  int64_t all = 0;
  for (const std::string& own : by_rank) all |= own.empty() ? 0 : std::stoll(own);
  return std::to_string(all);
}

Match match(const std::vector<Shared>& wanted, const StoredTensors& tensors, bool strict, const std::string& what,
            const char* place) {
  Match result{std::vector<const Stored*>(wanted.size(), nullptr)};
  std::vector<std::string>&missing = result.report.missing, &unexpected = result.report.unexpected;
  size_t at = 0;
  for (const Stored& next : tensors) {
    int order = -1;  // of the wanted one beside this one
    while (at < wanted.size() && (order = wanted[at].name.compare(next.entry.name)) < 0) ++at;
    if (at < wanted.size() && order == 0) {
      result.stored[at] = &next;
    } else {
      unexpected.push_back(next.entry.name);
    }
  }
  std::vector<std::string> unfit;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Shared& tensor = wanted[i];
    if (result.stored[i] == nullptr) {
      missing.push_back(tensor.name);
    } else if (std::string why = difference(result.stored[i]->entry, tensor.shape, tensor.dtype, place); !why.empty()) {
      unfit.push_back(std::move(why));
    }
  }
  if (strict && !missing.empty()) unfit.push_back(fmt::format("missing in {}: {}", place, listed(missing)));
  if (strict && !unexpected.empty()) unfit.push_back(fmt::format("unexpected in {}: {}", place, listed(unexpected)));
  if (!unfit.empty())
    fail(Code::kInvalidArgument, "{} does not fit, nothing was loaded: {}", what, fmt::join(unfit, "; "));
  return result;
}

LoadCall load_of(std::span<const TensorView> views, bool strict) {
  LoadCall call;
  call.choose = [=](const auto&, const auto&) { return std::vector<Chosen>{{{views.begin(), views.end()}, strict}}; };
  return call;
}

std::vector<LoadReport> LoadCall::run(Group& group, const LoadOptions& options) const {
  const auto started = base::now();
  const std::shared_ptr<base::TimedCalls> timed = timed_calls(group, options.timeout);
  const base::CallsTo here(timed.get());
  group::CollectiveCall ranks(group, options.timeout, options.progress);
  Fillings fillings;
  std::optional<Asked> asked;
  const auto want = [&](const std::string& words, const Catalogs& catalogs) {
    std::vector<Chosen> chosen = choose(words, catalogs);
    fillings.clear();
    group::Comparisons parts = {&asked.emplace(options)};
    for (size_t f = 0; f < catalogs.size(); ++f) {
      check_memory(chosen.at(f).views);
      Filling& filling = fillings.emplace_back(catalogs[f], std::move(chosen[f]), group.rank());
      parts.insert(parts.end(), {&filling.strict, &filling.wanted});
    }
    return parts;
  };
  const auto want_opened = [&](const Location& location, Catalogs catalogs) {
    for (auto& catalog : catalogs) {
      const auto kept = std::make_shared<const KeptOpen>(timed, catalog);
      catalog = {kept, kept->second.get()};
    }
    return want(location.words, catalogs);
  };
  if (open.empty()) {
    Finding{compared, find, want_opened}.run(ranks);
  } else {
    if (compared) ranks.compare(compared);
    ranks.compare([&] { return want({}, open); });
  }
  std::vector<LoadReport> reports = load_agreed(ranks, fillings, *asked, *this);
  for (LoadReport& report : reports) report.seconds = base::seconds_since(started);
  return reports;
}

uint64_t read_summed(const Catalog& catalog, const Stored& stored, const TensorView& view, bool summed) {
  Reader reader(catalog, {{&view, &stored, summed}});
  while (!reader.part().last) continue;
  return reader.sums()[0];
}

void read_one(const Catalog& catalog, const TensorView& view) {
  const Stored& stored = catalog.find(view.name);
  if (const std::string why = difference(stored.entry, view.region.shape(), view.dtype, "the file"); !why.empty())
    fail(Code::kInvalidArgument, "{}: {}", catalog.path, why);
  const bool summed = stored.crc && view.region == Region::whole(view.region.shape());
  if (const uint64_t sum = read_summed(catalog, stored, view, summed); summed && *stored.crc != sum) {
    fail(Code::kCorrupt, "{}: the data of '{}' is not what was saved (checksums differ): read another checkpoint",
         catalog.path, view.name);
  }
}

}  // namespace file

LoadReport load(Group& group, std::span<const TensorView> views, const std::filesystem::path& path,
                const LoadOptions& options) {
  group.begin("load()", options.timeout);
  file::LoadCall call = file::load_of(views, options.strict);
  call.find = [&] { return file::Location{{path}}; };
  return std::move(call.run(group, options).front());
}

LoadReport load(Group& group, std::span<const TensorView> views, const Checkpoint& checkpoint,
                const LoadOptions& options) {
  group.begin("load()", options.timeout);
  file::LoadCall call = file::load_of(views, options.strict);
  call.open = {file::Inside::shared(checkpoint)};
  return std::move(call.run(group, options).front());
}

}  // namespace shardow

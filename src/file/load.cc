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
#include "file/call.h"
#include "file/environment.h"
#include "file/ownership.h"
#include "file/reader.h"
#include "file/sharing.h"
#include "file/sums.h"
#include "group/agree.h"
#include "group/parts.h"
#include "group/wire.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using base::fail;
using group::Receiver;
using group::Sender;

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

/// All ranks' words_of(): what is asked for, and of each file whether it must fit and who holds what.
std::string sum_up_words(const std::vector<std::string>& by_rank) {
  const auto columns = group::columns(by_rank);
  Sender out;
  out.number(asked_by_any(columns[0]));
  for (size_t i = 1; i < columns.size(); i += 2) {
    out.number(asked_by_any(columns[i]));
    out.text(sum_up(columns[i + 1]));
  }
  return out.bytes();
}

/// One file's part of a load.
struct Filling {
  const std::shared_ptr<const Catalog> catalog;
  Chosen chosen;
  const Holding holding{chosen.views};
  std::vector<Shared> wanted = {};         ///< by all ranks, ascending by name
  std::vector<const Stored*> stored = {};  ///< of each, or null
  std::optional<Sums> sums = {};
  std::vector<Reader::Job> jobs = {};
  std::optional<Reader> reader = {};  ///< while there is something to read
  int64_t bytes_read = 0;
  std::string sum_words = {};  ///< of what was read, for sums

  Filling(std::shared_ptr<const Catalog> where, Chosen what) : catalog(std::move(where)), chosen(std::move(what)) {}
  int64_t bytes_in_all() const;
  group::Part part(int rank, bool verify);
};

/// Bytes that all ranks together will read, as they are in the file.
int64_t Filling::bytes_in_all() const {
  int64_t total = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (stored[i] == nullptr) continue;
    for (const Shared::Piece& piece : wanted[i].pieces)
      total +=
          piece.region.size() * dtype_bits(stored[i]->entry.dtype) / 8 * static_cast<int64_t>(piece.holders.size());
  }
  return total;
}

group::Part Filling::part(int rank, bool verify) {
  if (!reader) {
    if (verify) sums.emplace(catalog->path, wanted, stored);
    Finder finder(wanted);
    for (const TensorView& view : chosen.views) {
      const size_t at = finder.find(view.name).value();
      if (stored[at] != nullptr) jobs.push_back({&view, stored[at], sums && sums->of(at), at});
    }
    reader.emplace(*catalog, jobs);
  }
  const group::Part part = reader->part();
  if (part.last) {
    bytes_read = reader->bytes();
    if (sums) sum_words = sums->words(rank, jobs, reader->sums());
    reader.reset();
  }
  return part;
}

using Fillings = std::deque<Filling>;

std::string words_of(const Fillings& fillings, const LoadOptions& options, int rank) {
  Sender out;
  out.text(asked_by(options));
  for (const Filling& one : fillings) {
    out.text(one.chosen.strict ? "1" : "0");
    out.text(one.holding.words(rank));
  }
  return out.bytes();
}

/// Returns the comparison for when each rank has read what it wants; `end`: before that.
group::Comparison comparison_of(const Fillings& fillings, const std::function<void()>& end) {
  const auto words = [&fillings, end] {
    if (end) end();
    Sender out;
    for (const Filling& one : fillings) out.text(one.sum_words);
    return out.bytes();
  };
  const auto sum_up = [&fillings](const std::vector<std::string>& by_rank) {
    const auto sums = group::columns(by_rank);
    for (size_t f = 0; f < fillings.size(); ++f) {
      if (fillings[f].sums) fillings[f].sums->compare(sums[f]);
    }
    return std::string();
  };
  return {words, sum_up};
}

/// `sum`: of all ranks' words. What they want fits, or throws the same on all ranks; then each reads its own. One step,
/// if all are done within the time of a part.
std::vector<LoadReport> load_agreed(Group& group, Fillings& fillings, const std::string& sum, const LoadCall& call,
                                    const LoadOptions& options) {
  Receiver in(sum);
  const int64_t asked = in.number();
  std::vector<LoadReport> reports;
  int64_t total = 0;
  for (Filling& filling : fillings) {
    filling.chosen.strict = in.number() != 0;
    filling.wanted = shared_from(group, filling.holding, in.text(), options.timeout);
    Match fit =
        match(filling.wanted, filling.catalog->tensors, filling.chosen.strict, filling.catalog->path, "the file");
    filling.stored = std::move(fit.stored);
    fit.report.metadata = filling.catalog->metadata();
    reports.push_back(std::move(fit.report));
    total += filling.bytes_in_all();
  }
  if ((asked & kCheckOnly) != 0) return reports;
  auto next = fillings.begin();
  bool begun = false;
  group::Parts parts(group, options.timeout, total, options.progress);
  const auto part = [&] {
    if (!std::exchange(begun, true) && call.begin) call.begin(reports);
    group::Part all{0, false};
    for (const group::PartTime time; next != fillings.end() && !time.over();) {
      const group::Part one = next->part(group.rank(), (asked & kVerify) != 0);
      all.bytes += one.bytes;
      if (one.last) ++next;
    }
    return group::Part{all.bytes, next == fillings.end()};
  };
  parts.run(part, comparison_of(fillings, call.end));
  if ((asked & kProgress) != 0) agree(group, base::after(options.timeout), [&] { parts.tell(); });
  for (size_t f = 0; f < reports.size(); ++f) reports[f].bytes_read = fillings[f].bytes_read;
  return reports;
}

/// What was opened through timed calls, for whoever keeps it: the catalog goes first.
using KeptOpen = std::pair<std::shared_ptr<base::TimedCalls>, std::shared_ptr<const Catalog>>;

}  // namespace

std::string asked_by(const LoadOptions& options) {
  return std::to_string((options.strict ? kStrict : 0) | (options.verify ? kVerify : 0) |
                        (options.check_only ? kCheckOnly : 0) | (options.progress ? kProgress : 0));
}

int64_t asked_by_any(const std::vector<std::string>& by_rank) {
  int64_t asked = 0;
  for (const std::string& bits : by_rank) asked |= std::stoll(bits);
  return asked;
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
  const Environment machine{timed.get()};
  const InEnvironment here(&machine);
  Fillings fillings;
  const auto tell = [&](const std::string& words, const Catalogs& catalogs) {
    std::vector<Chosen> chosen = choose(words, catalogs);
    fillings.clear();
    for (size_t f = 0; f < catalogs.size(); ++f) {
      check_memory(chosen.at(f).views);
      fillings.emplace_back(catalogs[f], std::move(chosen[f]));
    }
    return words_of(fillings, options, group.rank());
  };
  const auto open_words = [&](const Location& location, Catalogs catalogs) {
    for (auto& catalog : catalogs) {
      const auto kept = std::make_shared<const KeptOpen>(timed, catalog);
      catalog = {kept, kept->second.get()};
    }
    return tell(location.words, catalogs);
  };
  std::string sum;
  if (open.empty()) {
    sum = Finding{compared, find, open_words, sum_up_words}.run(group, options.timeout).sum;
  } else {
    if (compared.words) group::agree_on(group, base::after(options.timeout), compared.words, compared.sum_up);
    sum = group::agree_on(
        group, base::after(options.timeout), [&] { return tell({}, open); }, sum_up_words);
  }
  std::vector<LoadReport> reports = load_agreed(group, fillings, sum, *this, options);
  for (LoadReport& report : reports) report.seconds = base::seconds_since(started);
  return reports;
}

void read_one(const Catalog& catalog, const TensorView& view) {
  const Stored& stored = catalog.find(view.name);
  if (const std::string why = difference(stored.entry, view.region.shape(), view.dtype, "the file"); !why.empty())
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

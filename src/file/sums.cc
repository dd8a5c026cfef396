// One message of every rank has its sums, in an order that all know; one rank draws the conclusion, for all.
#include "file/sums.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "group/wire.h"
#include "tensor/coverage.h"

namespace shardow::file {

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 20;
  std::string out = fmt::format(
      "{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kMost)), ", "));
  if (names.size() > kMost) out += fmt::format(" and {} more", names.size() - kMost);
  return out;
}

Sums::Sums(std::string path, const std::vector<Shared>& wanted, const std::vector<const Stored*>& there)
    : path_(std::move(path)), wanted_(wanted), there_(there) {
  std::map<std::pair<const void*, Shape>, bool> whole;  // of tensors that are held alike
  for (size_t t = 0; t < wanted.size(); ++t) {
    const auto [at, is_new] = whole.try_emplace({wanted[t].pieces.id(), wanted[t].shape});
    if (is_new) at->second = covers_once(regions_of(wanted[t]));
    verified_.push_back(there[t] != nullptr && there[t]->crc && at->second);
    firsts_.push_back(firsts_.back() + wanted[t].pieces.size());
  }
}

/// Calls fn(tensor, piece) for what a rank holds of tensors whose checksums are compared.
template <class Fn>
void Sums::for_each_of(int rank, Fn fn) const {
  for (size_t t = 0; t < wanted_.size(); ++t) {
    for (size_t p = 0; verified_[t] && p < wanted_[t].pieces.size(); ++p) {
      if (const auto& holders = wanted_[t].pieces[p].holders; std::binary_search(holders.begin(), holders.end(), rank))
        fn(t, p);
    }
  }
}

void Sums::add(int rank, std::span<const Reader::Job> jobs, const std::vector<uint64_t>& sums) {
  std::vector<uint64_t> mine(firsts_.back(), 0);
  for (size_t j = 0; j < jobs.size(); ++j) {
    const size_t t = jobs[j].number;
    for (size_t p = 0; verified_[t] && p < wanted_[t].pieces.size(); ++p) {
      if (wanted_[t].pieces[p].region == jobs[j].view->region) mine[place(t, p)] = sums[j];
    }
  }
  group::Sender out;
  for_each_of(rank, [&](size_t t, size_t p) { out.number(static_cast<int64_t>(mine[place(t, p)])); });
  words_ = out.bytes();
}

std::string Sums::sum_up(const std::vector<std::string>& by_rank) const {
  std::vector<uint64_t> all(wanted_.size(), 0);
  std::vector<uint64_t> by_first(firsts_.back(), 0);
  std::set<size_t> wrong;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    group::Receiver in(by_rank[rank]);
    for_each_of(static_cast<int>(rank), [&](size_t t, size_t p) {
      const auto sum = static_cast<uint64_t>(in.number());
      if (wanted_[t].pieces[p].holders[0] == static_cast<int>(rank))
        all[t] ^= by_first[place(t, p)] = sum;  // before the others': ranks ascend
      if (by_first[place(t, p)] != sum) wrong.insert(t);
    });
  }
  for (size_t t = 0; t < wanted_.size(); ++t) {
    if (verified_[t] && *there_[t]->crc != all[t]) wrong.insert(t);
  }
  if (!wrong.empty()) fail_changed(wrong);
  return "";
}

void Sums::fail_changed(const std::set<size_t>& tensors) const {
  std::vector<std::string> names;
  names.reserve(tensors.size());
  for (const size_t t : tensors) names.push_back("'" + wanted_[t].name + "'");
  base::fail(Code::kCorrupt,
             "{}: the data of {} is not what was saved (checksums differ); the tensors that were loaded into hold it: "
             "load another checkpoint",
             path_, listed(names));
}

}  // namespace shardow::file

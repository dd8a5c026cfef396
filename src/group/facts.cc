#include "group/facts.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/errors.h"
#include "group/ranks.h"
#include "group/wire.h"

namespace shardow::group {
namespace {

using base::fail;

void add(Sender& out, const Fact& fact) {
  for (const std::string* text : {&fact.name, &fact.value, &fact.way_out, &fact.set}) out.text(*text);
}

[[noreturn]] void refuse(std::string_view call, const Fact& fact, std::string_view value, size_t rank,
                         std::string_view other, size_t other_rank) {
  fail(Code::kInvalidArgument, "{}: ranks disagree. {} is {} on rank {} and {} on rank {}{}{}", call, fact.name, value,
       rank, other, other_rank, fact.way_out.empty() ? "" : "; ", fact.way_out);
}

/// Throws for the first difference, by ranks; of facts of sets with the number of those that differ too.
void check_equal(std::string_view call, const std::vector<std::string>& by_rank) {
  using Name = std::pair<std::string, std::string>;  // of a set, of a fact
  std::map<Name, std::pair<size_t, Fact>> known;     // on the first rank
  std::set<Name> wrong;
  Fact first_wrong;  // its value: what the message says of it
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (rank > 0 && by_rank[rank] == by_rank[0]) continue;
    std::set<Name> own;
    for (Receiver in(by_rank[rank]); !in.done();) {
      Fact fact{in.text(), in.text(), in.text(), in.text()};
      own.emplace(fact.set, fact.name);
      const auto [entry, is_new] = known.try_emplace({fact.set, fact.name}, rank, fact);
      const auto& [first, other] = entry->second;
      if (is_new && rank > 0 && fact.set.empty()) refuse(call, fact, "missing", 0, fact.value, rank);
      if (other.value == fact.value) continue;
      if (fact.set.empty()) refuse(call, fact, other.value, first, fact.value, rank);
      fact.value = fmt::format("has other values on rank {} than on rank {}", first, rank);
      if (wrong.empty()) first_wrong = fact;
      wrong.emplace(fact.set, fact.name);
    }
    for (const auto& [name, first] : known) {
      if (name.first.empty() && !own.contains(name))
        refuse(call, first.second, first.second.value, first.first, "missing", rank);
    }
  }
  if (wrong.empty()) return;
  fail(Code::kInvalidArgument, "{}: {}{} {}; {}", call, first_wrong.name.c_str(),
       wrong.size() == 1 ? "" : fmt::format(" (and {} more)", wrong.size() - 1), first_wrong.value,
       first_wrong.way_out);
}

}  // namespace

/// Makes one digest of the facts of all ranks, under 0, and of each set one of its values, under that of its names.
EqualFacts::EqualFacts(std::string call, const Facts& facts) : call_(std::move(call)) {
  std::map<std::string, std::vector<const Fact*>> sets;
  Sender text, digests;
  for (const Fact& fact : facts) {
    add(text, fact);
    sets[fact.set].push_back(&fact);
  }
  for (auto& [set, members] : sets) {
    std::stable_sort(members.begin(), members.end(), [](const Fact* a, const Fact* b) { return a->name < b->name; });
    std::string names = set;
    Sender all;
    for (const Fact* fact : members) {
      names += '\0' + fact->name;
      add(all, *fact);
    }
    digests.number(set.empty() ? 0 : static_cast<int64_t>(digest(names)));
    digests.number(static_cast<int64_t>(digest(all.bytes())));
  }
  text_ = text.bytes();
  digests_ = digests.bytes();
}

std::string EqualFacts::sum_up(const std::vector<std::string>& by_rank) const {
  std::map<int64_t, int64_t> digests;
  for (const std::string& words : by_rank) {
    for (Receiver in(words); !in.done();) {
      const int64_t names = in.number(), values = in.number();
      if (digests.try_emplace(names, values).first->second != values) return "they differ";
    }
  }
  return "";
}

void EqualFacts::take(CollectiveCall& call, const std::string& total) {
  if (total.empty()) return;
  const auto refuse = [&](const std::vector<std::string>& by_rank) {
    check_equal(call_, by_rank);
    return Ranks::Decision{};
  };
  ranks_of(call.group()).decide(text_, refuse, call.deadline());
}

}  // namespace shardow::group

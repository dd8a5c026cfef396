#include "file/call.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "base/machine.h"
#include "file/sharing.h"
#include "group/wire.h"

namespace shardow::file {
namespace {

/// Compares on which machines ranks are, which may share a name.
class SeveralHosts final : public group::Comparison {
 public:
  std::string words() override { return std::to_string(group::digest(base::host_name() + base::view_of_files())); }
  std::string sum_up(const std::vector<std::string>& by_rank) const override {
    const bool same = std::all_of(by_rank.begin(), by_rank.end(), [&](const auto& host) { return host == by_rank[0]; });
    return same ? "" : "several";
  }
  void take(group::CollectiveCall& /*call*/, const std::string& total) override { several = !total.empty(); }

  bool several = false;
};

/// Returns what rank 0 alone knows: the nonce of the save, its host, and metadata of each file.
std::string known_by_first(const Request& request) {
  group::Sender out;
  out.text(base::make_nonce());
  out.text(base::host_name());
  for (const SaveFile& file : request.files) {
    Metadata all = file.metadata;
    all.insert(request.options.metadata.begin(), request.options.metadata.end());
    out.map(all);
  }
  return out.bytes();
}

}  // namespace

Call same_call(group::CollectiveCall& ranks, const SaveCall& call) {
  Call known;
  SeveralHosts hosts;
  std::optional<group::EqualFacts> facts;
  std::optional<group::FromFirst> first;
  std::deque<SharedTensors> tensors;
  ranks.compare([&] {
    known.request = call.request();
    check_request(known.request, call.producer);
    group::Comparisons parts = {&facts.emplace(call.name, facts_of(known.request)),
                                &first.emplace(ranks.rank() == 0 ? known_by_first(known.request) : ""), &hosts};
    if (call.compared) {
      const group::Comparisons more = call.compared();
      parts.insert(parts.end(), more.begin(), more.end());
    }
    for (const SaveFile& file : known.request.files) parts.push_back(&tensors.emplace_back(file.tensors, ranks.rank()));
    return parts;
  });
  known.several_hosts = hosts.several;
  group::Receiver in(first->text);
  known.nonce = in.text();
  known.host = in.text();
  std::vector<Metadata> more(known.request.files.size());
  if (call.metadata) more = call.metadata();
  for (size_t file = 0; file < tensors.size(); ++file) {
    known.metadata.push_back(in.map());
    for (auto& [key, text] : more.at(file)) known.metadata.back()[key] = std::move(text);
    known.tensors.push_back(std::make_shared<const std::vector<Shared>>(std::move(tensors[file].all)));
  }
  return known;
}

}  // namespace shardow::file

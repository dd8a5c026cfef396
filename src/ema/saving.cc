// What a save of an Average has beside that of tensors: their files' names, and the state of all ranks in each.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "ema/agreed.h"
#include "ema/names.h"
#include "file/call.h"
#include "group/collective_call.h"
#include "shardow/ema_file.h"

namespace shardow {
namespace {

using base::fail;

void check(const Average& ema, const SaveOptions& options) {
  if (options.dtype) {
    fail(Code::kInvalidArgument,
         "an EMA is saved in the dtype of its averages, since a run goes on from them; for inference, save its views() "
         "as tensors");
  }
  if (options.max_shard_size != 0 && ema.size() > 1)
    fail(Code::kInvalidArgument, "max_shard_size goes with one schedule; of {}, each average has one file", ema.size());
  if (options.metadata.contains(kStateKey))
    fail(Code::kInvalidArgument, "metadata '{}' is the EMA's own state; choose another key", kStateKey);
  static_cast<void>(ema.views());  // throws while swapped
  static_cast<void>(decay_keys(ema.schedules()));
}

}  // namespace

std::vector<SaveFile> ema_files_with(const Average& ema, const std::string& state) {
  const std::vector<std::string> keys = decay_keys(ema.schedules());
  std::vector<SaveFile> files;
  for (size_t k = 0; k < keys.size(); ++k) {
    const std::span<const TensorView> views = ema.views(k);
    files.push_back(
        {keys.size() == 1 ? "" : ema_file_name(keys[k]), {views.begin(), views.end()}, {{kStateKey, state}}, true});
  }
  return files;
}

SaveReport save(Group& group, const Average& ema, const std::filesystem::path& path, const SaveOptions& options) {
  group.begin("save()", options.timeout);
  std::optional<ema::EqualStates> states;
  std::optional<group::EqualFacts> copies;
  file::SaveCall call;
  call.request = [&] {
    check(ema, options);
    const std::string state = ema.state();
    file::Request request{ema_files_with(ema, state), path, options};
    states.emplace("save()", state, group::Facts());
    copies.emplace("save()", group.size() > 1 ? ema::copies_in(request.files) : group::Facts());
    return request;
  };
  call.compared = [&] { return group::Comparisons{&*states, &*copies}; };
  call.metadata = [&] { return std::vector<file::Metadata>(ema.size(), file::Metadata{{kStateKey, states->state()}}); };
  return call.begin(group, options.timeout)->write();
}

std::vector<SaveFile> ema_files(Group& group, const Average& ema, std::chrono::milliseconds timeout) {
  group.begin("ema_files()", timeout);
  std::optional<ema::EqualStates> states;
  group::CollectiveCall(group, timeout).compare([&] {
    check(ema, {});
    return group::Comparisons{&states.emplace("ema_files()", ema.state(), group::Facts())};
  });
  return ema_files_with(ema, states->state());
}

}  // namespace shardow

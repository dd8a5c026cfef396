// The protocol of a save, whose steps are in save_plan.cc.
#include <utility>

#include "base/errors.h"
#include "base/paths.h"
#include "base/turns.h"
#include "file/kept_plans.h"
#include "file/save_plan.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

/// What this rank writes: the parts of a plan, in the memory that its views have now.
std::vector<Mine> in_memory(const std::vector<OwnPart>& parts, std::span<const SaveFile> files,
                            const Producer* producer) {
  std::vector<Mine> mine;
  mine.reserve(parts.size());
  for (const OwnPart& part : parts) {
    const TensorView& view = files[part.file].tensors[part.view];
    Mine& one = mine.emplace_back(Mine{part.tensor, part.piece, part.region, nullptr, view.dtype, view.device});
    if (view.data != nullptr) {
      one.data = static_cast<const std::byte*>(view.data) + part.local_begin * dtype_bits(view.dtype) / 8;
    } else {
      one.producer = producer;
      one.name = view.name;
    }
  }
  return mine;
}

/// What was worked out for the last save of the same tensors, where every rank has what it had then; else anew.
/// Collective.
std::shared_ptr<const KeptPlan> plan_of(Group& group, std::span<const SaveFile> files, const SaveOptions& options) {
  std::shared_ptr<const KeptPlan> kept = kept_plan(group, files, options);
  std::vector<Sharing> sharings;
  bool as_before = kept != nullptr;
  for (size_t f = 0; f < files.size(); ++f) {
    const Sharing* const before = kept ? &kept->sharings[f] : nullptr;
    sharings.push_back(share(group, files[f].tensors, before, options.timeout));
    as_before = as_before && before != nullptr && sharings[f].tensors == before->tensors;
  }
  return as_before ? kept : new_plan(group, files, options, std::move(sharings));
}

/// Ranks that are missing are told of without the path.
void say_where(const Error& error, const base::Path& target) {
  const std::string said = error.what();
  if ((error.code() != Code::kTimeout && error.code() != Code::kPeerFailed) ||
      said.find(target.string()) != std::string::npos)
    return;
  throw Error(error.code(), fmt::format("{}: {}", target.string(), said), error.os_errno());
}

}  // namespace
}  // namespace file

using namespace file;

StagedSave::StagedSave(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path,
                       const SaveOptions& options)
    : StagedSave(group, files, path, options, nullptr) {}

StagedSave::StagedSave(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path,
                       const SaveOptions& options, const Producer* producer)
    : plan_(new Plan{timed_calls(group, options.timeout),
                     group,
                     options,
                     producer,
                     files.size() == 1 && files[0].name.empty(),
                     {},
                     {},
                     {},
                     {},
                     0,
                     base::now()}) {
  Plan& plan = *plan_;
  const InEnvironment here(plan.environment());
  const bool directory = !plan.hugging_face || path.extension() != ".safetensors";
  agree(group, base::now() + options.timeout, [&] {
    check_call(files, options, producer);
    if (directory || options.texts.empty()) return;
    base::fail(Code::kInvalidArgument, "{}: {} goes with a directory, and this is the name of one file", path.string(),
               options.texts.begin()->first);
  });
  plan.call = same_call(group, files, path, options, plan.deadline());
  const std::shared_ptr<const KeptPlan> found = plan_of(group, files, options);  // (1)
  plan.layout.emplace(found->arrangement, plan.call.metadata);
  if (!directory && plan.layout->files().size() > 1) {
    base::fail(Code::kInvalidArgument, "{}: {} files do not fit into one name; for max_shard_size give a directory",
               path.string(), plan.layout->files().size());
  }
  plan.draft = base::in_our_words([&] {
    base::check_path(path);
    return draft_for(path, directory, plan.hugging_face, plan.call.nonce);
  });
  plan.draft->host = plan.call.host;
  plan.mine = in_memory(found->own, files, producer);
}

StagedSave::StagedSave(Group& group, std::span<const TensorView> tensors, const std::filesystem::path& path,
                       const SaveOptions& options)
    : StagedSave(group, std::vector<SaveFile>{{"", {tensors.begin(), tensors.end()}}}, path, options) {}

StagedSave::~StagedSave() = default;

size_t StagedSave::staging_bytes() const noexcept {
  int64_t bytes = 0;
  for (const Mine& mine : plan_->mine)
    bytes += mine.region.size() * dtype_bits(plan_->layout->place(mine.tensor).entry.dtype) / 8;
  return static_cast<size_t>(bytes);
}

void StagedSave::stage(std::span<std::byte> memory) {
  Plan& plan = *plan_;
  if (plan.staged || plan.begun)
    base::fail(Code::kInvalidArgument, "{}: stage() comes once, before write()", plan.draft->target.string());
  if (memory.size() < staging_bytes())
    base::fail(Code::kInvalidArgument, "{}: {} bytes of staging memory; {} are needed", plan.draft->target.string(),
               memory.size(), staging_bytes());
  plan.staged = true;
  const InEnvironment here(plan.environment());
  Feed feed;
  std::byte* to = memory.data();
  for (Mine& mine : plan.mine) {
    const DType dtype = plan.layout->place(mine.tensor).entry.dtype;
    feed.copy(mine, 0, mine.region.size(), dtype, to);
    mine = {mine.tensor, mine.piece, mine.region, to, dtype, {}};
    to += mine.region.size() * dtype_bits(dtype) / 8;
  }
}

SaveReport StagedSave::write() {
  Plan& plan = *plan_;
  if (std::exchange(plan.begun, true))
    base::fail(Code::kInvalidArgument, "{}: write() was called already; another save is another StagedSave",
               plan.draft->target.string());
  const InEnvironment here(plan.environment());
  try {
    const Storage storage = plan.storage();
    if (!storage.rename) {
      plan.draft->in_place = true;
      if (plan.hugging_face && plan.draft->directory) plan.layout->rename_files(plan.call.nonce);
      agree(plan.group, plan.deadline(), [&] {
        std::vector<std::string> names;
        for (const FilePlan& file : plan.layout->files()) names.push_back(file.name);
        if (plan.group.rank() == 0) prepare_in_place(*plan.draft, names, plan.patience());
      });
    }
    if (storage.random_writes && storage.rename && !plan.options.sequential) {
      plan.write_anywhere();
    } else {
      plan.write_in_sequence();
    }
    agree(plan.group, plan.deadline(), [&] {
      if (plan.group.rank() == 0) plan.commit();
    });
  } catch (const Error& error) {
    plan.give_up();
    say_where(error, plan.draft->target);
    throw;
  } catch (...) {
    plan.give_up();
    throw;
  }
  return plan.report();
}

SaveReport Producer::save(Group& group, std::span<const TensorView> tensors, const std::filesystem::path& path,
                          const SaveOptions& options) const {
  const SaveFile file{"", {tensors.begin(), tensors.end()}};
  return StagedSave(group, {&file, 1}, path, options, this).write();
}

SaveReport save(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path,
                const SaveOptions& options) {
  group.begin("save()", options.timeout);
  return StagedSave(group, files, path, options).write();
}

SaveReport save(Group& group, std::span<const TensorView> views, const std::filesystem::path& path,
                const SaveOptions& options) {
  group.begin("save()", options.timeout);
  return StagedSave(group, views, path, options).write();
}

}  // namespace shardow

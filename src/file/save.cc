// The protocol of a save, whose steps are in save_plan.cc.
#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/paths.h"
#include "base/turns.h"
#include "file/save_plan.h"
#include "file/sharing.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using Tensors = std::shared_ptr<const std::vector<Shared>>;  // of one file

/// Returns the parts of tensors that this rank writes, in the memory of its views, ascending by tensor.
std::vector<Mine> own_parts(int rank, const Arrangement& arrangement, const std::vector<Tensors>& tensors,
                            std::span<const SaveFile> files, const Producer* producer) {
  std::vector<std::vector<const TensorView*>> views(arrangement.tensors().size());
  for (size_t f = 0; f < files.size(); ++f) {
    Finder finder(*tensors[f]);
    for (const TensorView& view : files[f].tensors)
      views[arrangement.first_of(f) + *finder.find(view.name)].push_back(&view);
  }
  std::vector<Mine> parts;
  for (size_t t = 0; t < views.size(); ++t) {
    for (const Owned& owned : arrangement.owners(t, rank)) {
      const Region& held = arrangement.tensors()[t].pieces[owned.piece].region;
      const TensorView& view =
          **std::find_if(views[t].begin(), views[t].end(), [&](const auto* v) { return v->region == held; });
      Mine& part = parts.emplace_back(Mine{t, owned.piece, owned.region, nullptr, view.dtype, view.device});
      if (view.data != nullptr) {
        part.data = static_cast<const std::byte*>(view.data) + owned.local_begin * dtype_bits(view.dtype) / 8;
      } else {
        part.producer = producer;
        part.name = view.name;
      }
    }
  }
  return parts;
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
  std::vector<Tensors> tensors;  // (1)
  std::vector<Volume> volumes;
  for (const SaveFile& file : files) {
    tensors.push_back(share(group, file.tensors, options.timeout));
    check_whole(*tensors.back());
    volumes.push_back({file.name, tensors.back()});
  }
  const auto arrangement = std::make_shared<const Arrangement>(volumes, options);
  plan.layout.emplace(arrangement, plan.call.metadata);
  if (!directory && plan.layout->files().size() > 1) {
    base::fail(Code::kInvalidArgument, "{}: {} files do not fit into one name; for max_shard_size give a directory",
               path.string(), plan.layout->files().size());
  }
  plan.draft = base::in_our_words([&] {
    base::check_path(path);
    return draft_for(path, directory, plan.hugging_face, plan.call.nonce);
  });
  plan.draft->host = plan.call.host;
  plan.mine = own_parts(group.rank(), *arrangement, tensors, files, producer);
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
    if (storage.random_writes && storage.rename) {
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

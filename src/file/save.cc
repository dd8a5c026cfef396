// The protocol of a save; the numbered steps are those of docs/durability.md.
#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

#include "base/errors.h"
#include "base/paths.h"
#include "base/seconds.h"
#include "base/turns.h"
#include "comm/parts.h"
#include "file/call.h"
#include "file/direct.h"
#include "file/environment.h"
#include "file/kept_plans.h"
#include "file/producer.h"
#include "file/publish.h"
#include "file/small_files.h"
#include "file/stripe_writer.h"
#include "file/timed.h"
#include "shardow/checkpoint.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

/// What this rank writes: the parts of a plan, in the memory that its views have now.
std::vector<Mine> in_memory(const std::vector<OwnPart>& parts, std::span<const SaveFile> files, const Producer* producer) {
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

/// What was worked out for the last save of the same tensors, where every rank has what it had then; else anew. Collective.
std::shared_ptr<const KeptPlan> plan_of(Group& group, std::span<const SaveFile> files, const SaveOptions& options) {
  std::shared_ptr<const KeptPlan> kept = kept_plan(group, files, options);
  std::vector<Sharing> sharings;
  bool as_before = kept != nullptr;
  for (size_t f = 0; f < files.size(); ++f) {
    const Sharing* const before = kept ? &kept->sharings[f] : nullptr;
    sharings.push_back(share(group, files[f].tensors, before, options.timeout));
    as_before = as_before && sharings[f].tensors == before->tensors;
  }
  return as_before ? kept : new_plan(group, files, options, std::move(sharings));
}

/// Ranks that are missing are told of without the path.
void say_where(const Error& error, const base::Path& target) {
  const std::string said = error.what();
  if ((error.code() != Code::kTimeout && error.code() != Code::kPeerFailed) || said.find(target.string()) != std::string::npos) return;
  throw Error(error.code(), fmt::format("{}: {}", target.string(), said), error.os_errno());
}

}  // namespace
}  // namespace file

using namespace file;

struct StagedSave::Plan {
  std::unique_ptr<base::TimedCalls> timed;  ///< where calls are the machine's own
  Group& group;
  SaveOptions options;
  const Producer* producer;  ///< of what has no memory; may be null
  bool hugging_face;         ///< files are named by us, and have an index where there are several
  Call call;
  std::optional<Layout> layout;
  std::optional<Draft> draft;
  std::vector<Mine> mine;
  int64_t written = 0;
  base::Time begin;
  Environment machine{timed.get()};
  bool staged = false, begun = false;

  const Environment* environment() const { return timed ? &machine : nullptr; }
  Deadline deadline() const { return base::now() + options.timeout; }
  Deadline patience() const { return base::now() + options.timeout * 3 / 4; }  ///< with another save; the ranks wait meanwhile
  Storage storage();
  std::deque<Output> outputs() const;
  void write_anywhere();
  void write_in_sequence();
  void commit();
  void give_up() noexcept;
  SaveReport report() const;
};

StagedSave::StagedSave(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path, const SaveOptions& options)
    : StagedSave(group, files, path, options, nullptr) {}

StagedSave::StagedSave(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path, const SaveOptions& options,
                       const Producer* producer)
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
    base::fail(Code::kInvalidArgument, "{}: {} files do not fit into one name; for max_shard_size give a directory", path.string(),
               plan.layout->files().size());
  }
  plan.draft = base::in_our_words([&] {
    base::check_path(path);
    return draft_for(path, directory, plan.hugging_face, plan.call.nonce);
  });
  plan.draft->host = plan.call.host;
  plan.mine = in_memory(found->own, files, producer);
}

StagedSave::StagedSave(Group& group, std::span<const TensorView> tensors, const std::filesystem::path& path, const SaveOptions& options)
    : StagedSave(group, std::vector<SaveFile>{{"", {tensors.begin(), tensors.end()}}}, path, options) {}

StagedSave::~StagedSave() = default;

size_t StagedSave::staging_bytes() const noexcept {
  int64_t bytes = 0;
  for (const Mine& mine : plan_->mine) bytes += mine.region.size() * dtype_bits(plan_->layout->place(mine.tensor).entry.dtype) / 8;
  return static_cast<size_t>(bytes);
}

std::vector<std::pair<std::string, Shape>> StagedSave::tensors() const {
  std::vector<std::pair<std::string, Shape>> all;
  for (const Shared& tensor : plan_->layout->tensors()) all.emplace_back(tensor.name, tensor.shape);
  return all;
}

void StagedSave::stage(std::span<std::byte> memory) {
  Plan& plan = *plan_;
  if (plan.staged || plan.begun) base::fail(Code::kInvalidArgument, "{}: stage() comes once, before write()", plan.draft->target.string());
  if (memory.size() < staging_bytes())
    base::fail(Code::kInvalidArgument, "{}: {} bytes of staging memory; {} are needed", plan.draft->target.string(), memory.size(),
               staging_bytes());
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

/// (2)
Storage StagedSave::Plan::storage() {
  uint64_t missing = 0;
  agree(group, deadline(), [&] {
    if (group.rank() != 0) return;
    std::vector<std::pair<std::string, int64_t>> sizes;
    for (const FilePlan& file : layout->files()) sizes.emplace_back(file.name, file.size());
    const Storage found = prepare(*draft, sizes, call.several_hosts, patience());
    missing = (found.random_writes ? 0u : 1u) + (found.rename ? 0u : 2u);
  });
  group.all_reduce({&missing, 1}, Group::Op::kMax, deadline());
  return {(missing & 1) == 0, (missing & 2) == 0};
}

/// One for each thread that writes; several where tensors are produced.
std::deque<Output> StagedSave::Plan::outputs() const {
  const bool produced = std::any_of(mine.begin(), mine.end(), [](const Mine& one) { return one.producer != nullptr; });
  std::deque<Output> outputs;
  for (int i = 0; i < (produced ? producer->threads : 1); ++i) outputs.emplace_back(*layout, *draft, options.checksums, produced);
  return outputs;
}

/// (3), (4), (5)
void StagedSave::Plan::write_anywhere() {
  std::deque<Output> outputs = this->outputs();
  Output& output = outputs.front();
  comm::Parts parts(group, options.timeout, layout->total(), options.progress);
  const std::vector<bool> shared = group.moves_blocks() ? have_short_runs(*layout) : std::vector<bool>(layout->tensors().size(), false);
  std::vector<Mine> alone;
  std::copy_if(mine.begin(), mine.end(), std::back_inserter(alone), [&](const Mine& one) { return !shared[one.tensor]; });
  Direct direct(alone, *layout, outputs, false);
  parts.run([&] { return direct.part(); });
  StripeWriter stripes(group, options.timeout, mine, *layout, output, plan_rounds(*layout, shared, group.size(), false), false);
  parts.run([&] { return stripes.round(); });
  agree(group, deadline(), [&] {
    parts.tell();
    for (Output& one : outputs) one.finish();
    for (size_t i = 1; i < outputs.size(); ++i) output.add(outputs[i]);
  });
  if (producer != nullptr && producer->check) producer->check();
  if (options.checksums) group.all_reduce(output.crcs(), Group::Op::kXor, deadline());
  agree(group, deadline(), [&] {
    if (group.rank() != 0) return;
    if (options.checksums) layout->set_checksums(output.crcs());
    for (const FilePlan& file : layout->files()) write_header(draft->file(file.name), file);
  });
  written = output.written();
}

/// Headers come first here, so that checksums are counted before anything is written.
void StagedSave::Plan::write_in_sequence() {
  if (group.size() > 1 && !group.moves_blocks()) {
    base::fail(Code::kUnsupported,
               "{}: this storage takes files only from front to end, and these ranks cannot send each other what one of them would write; "
               "save elsewhere, or with a process group for CPU tensors (cpu:gloo,cuda:nccl)",
               draft->target.string());
  }
  std::deque<Output> outputs = this->outputs();
  Output& output = outputs.front();
  if (options.checksums) {
    Direct count(mine, *layout, outputs, true);
    comm::Parts(group, options.timeout, layout->total(), {}).run([&] { return count.part(); });
    for (size_t i = 1; i < outputs.size(); ++i) output.add(outputs[i]);
    if (producer != nullptr && producer->check) producer->check();
    group.all_reduce(output.crcs(), Group::Op::kXor, deadline());
    layout->set_checksums(output.crcs());
  }
  const std::vector<bool> all(layout->tensors().size(), true);
  StripeWriter stripes(group, options.timeout, mine, *layout, output, plan_rounds(*layout, all, group.size(), true), true);
  comm::Parts parts(group, options.timeout, layout->total(), options.progress);
  parts.run([&] { return stripes.round(); });
  agree(group, deadline(), [&] {
    parts.tell();
    output.finish();
  });
  if (producer != nullptr && producer->check) producer->check();
  written = output.written();
}

/// (6)
void StagedSave::Plan::commit() {
  if (hugging_face && (layout->files().size() > 1 || (draft->in_place && draft->directory))) write_index(*draft, *layout);
  write_texts(*draft, options.texts);
  if (!draft->in_place) {
    publish(*draft);
  } else if (hugging_face && draft->directory) {
    remove_old(*draft);
  }
  release(*draft);
}

void StagedSave::Plan::give_up() noexcept {
  if (group.rank() != 0) return;
  if (base::syscalls().left_one()) return release(*draft);  // the next save removes what storage that stands still has of this one
  discard(*draft);
}

SaveReport StagedSave::Plan::report() const {
  SaveReport report;
  for (const FilePlan& file : layout->files()) report.files.push_back(draft->directory ? draft->target / file.name : draft->target);
  report.bytes_written = written;
  report.seconds = base::seconds_since(begin);
  return report;
}

SaveReport StagedSave::write() {
  Plan& plan = *plan_;
  if (std::exchange(plan.begun, true))
    base::fail(Code::kInvalidArgument, "{}: write() was called already; another save is another StagedSave", plan.draft->target.string());
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

SaveReport save(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path, const SaveOptions& options) {
  group.begin("save()", options.timeout);
  return StagedSave(group, files, path, options).write();
}

SaveReport save(Group& group, std::span<const TensorView> views, const std::filesystem::path& path, const SaveOptions& options) {
  group.begin("save()", options.timeout);
  return StagedSave(group, views, path, options).write();
}

}  // namespace shardow

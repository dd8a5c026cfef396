// A save: what it works with, its steps, numbered as in docs/durability.md, and the protocol of its ranks.
#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/paths.h"
#include "base/turns.h"
#include "file/call.h"
#include "file/direct.h"
#include "file/header.h"
#include "file/index.h"
#include "file/names.h"
#include "file/staging.h"
#include "file/stripes.h"
#include "file/timed.h"
#include "group/collective_call.h"
#include "group/counts.h"
#include "group/ranks.h"
#include "group/wire.h"
#include "tensor/dtype.h"

namespace shardow {
namespace file {
namespace {

using Tensors = std::shared_ptr<const std::vector<Shared>>;  // of one file

/// Returns the parts of tensors that this rank writes, in the memory of its views, ascending by tensor.
std::vector<Mine> own_parts(int rank, const Layout& layout, const std::vector<Tensors>& tensors,
                            std::span<const SaveFile> files, const Producer* producer) {
  std::vector<std::vector<const TensorView*>> views(layout.tensors().size());
  for (size_t f = 0; f < files.size(); ++f) {
    Finder finder(*tensors[f]);
    for (const TensorView& view : files[f].tensors)
      views[layout.first_of(f) + *finder.find(view.name)].push_back(&view);
  }
  std::vector<Mine> parts;
  for (size_t t = 0; t < views.size(); ++t) {
    for (const Owned& owned : layout.owners(t, rank)) {
      const Region& held = layout.tensors()[t].pieces[owned.piece].region;
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

/// Header after byte 8, then, when that is on disk, the length: until then no reader takes the file.
void write_header(const base::Path& path, const FilePlan& file_plan) {
  const std::string bytes = header_bytes(file_plan.entries, file_plan.metadata, file_plan.data_begin);
  const std::span<const std::byte> all = std::as_bytes(std::span(bytes));
  base::File file = base::File::open_for_writing(path);
  file.write(all.subspan(static_cast<size_t>(kLengthBytes)), kLengthBytes);
  file.sync();
  file.write(all.first(static_cast<size_t>(kLengthBytes)), 0);
  file.sync();
  file.close();
}

/// Returns the text that names the files of `layout`, where they are called `names`. `given`: of the caller.
std::string list_text(const Target& target, const Layout& layout, const std::string& given,
                      const std::vector<std::string>& names, const std::set<std::string>& replaced) {
  if (target.hugging_face) {
    WeightMap weights;
    for (size_t f = 0; f < names.size(); ++f) {
      for (const Entry& entry : layout.files()[f].entries) weights[entry.name] = names[f];
    }
    return index_bytes(weights, layout.total(), replaced);
  }
  Listing listing{{}, replaced};
  bool plain = true;
  for (size_t f = 0; f < names.size(); ++f) {
    const std::string& name = layout.files()[f].asked;
    listing.files[name] = names[f];
    plain = plain && name == names[f];
  }
  if (!given.empty() && plain && replaced.empty()) return given;
  return with_listing(given.empty() ? "{}" : given, listing);
}

}  // namespace
}  // namespace file

using namespace file;

struct StagedSave::Plan {
  std::unique_ptr<base::TimedCalls> timed;  ///< where calls are the machine's own
  group::CollectiveCall ranks;
  const file::Producer* producer;  ///< of what has no memory; may be null
  SaveOptions options = {};
  bool hugging_face = false;  ///< files are named by us, and have an index where there are several
  file::Call call = {};
  std::optional<file::Layout> layout = {};
  std::optional<file::Target> target = {};
  std::unique_ptr<file::Staging> staging = {};  ///< rank 0's
  std::vector<file::Mine> mine = {};
  int64_t written = 0;
  base::Time begin = base::now();
  bool staged = false, begun = false;

  Group& group() const { return ranks.group(); }
  /// With another save; the ranks wait meanwhile.
  Deadline patience() const { return base::after(ranks.timeout() - ranks.timeout() / 4); }
  void open();
  std::deque<file::Output> outputs() const;
  std::vector<group::Counts> counts(file::Output& output) const;
  void write_anywhere();
  void write_in_sequence();
  void commit(const std::function<void()>& join, const std::function<void()>& before);
  void give_up() noexcept;
  SaveReport report() const;
};

/// (2)
void StagedSave::Plan::open() {
  group::FromFirst known;
  ranks.compare([&] {
    if (ranks.rank() > 0) return group::Comparisons{&known};
    file::Sizes sizes;
    for (const FilePlan& file : layout->files()) sizes.emplace_back(file.name, file.size());
    staging = std::make_unique<Staging>(*target, std::move(sizes), call.several_hosts, patience());
    group::Sender out;
    for (const bool fact : {target->in_place, target->random_writes, target->renames}) out.number(fact ? 1 : 0);
    known.text = out.bytes();
    return group::Comparisons{&known};
  });
  group::Receiver in(known.text);
  for (bool* one : {&target->in_place, &target->random_writes, &target->renames}) *one = in.number() != 0;
  if (!target->renames && !target->list_name.empty()) layout->rename_files(target->nonce);
}

/// One for each thread that writes; several where tensors are produced.
std::deque<Output> StagedSave::Plan::outputs() const {
  const bool produced = std::any_of(mine.begin(), mine.end(), [](const Mine& one) { return one.producer != nullptr; });
  std::deque<Output> outputs;
  for (int i = 0; i < (produced ? producer->threads : 1); ++i)
    outputs.emplace_back(*layout, *target, options.checksums, produced);
  return outputs;
}

/// Returns the counts of this rank while it wrote.
std::vector<group::Counts> StagedSave::Plan::counts(Output& output) const {
  std::vector<group::Counts> counts = producer != nullptr ? producer->counts : std::vector<group::Counts>();
  if (options.checksums) counts.push_back({output.crcs(), group::Op::kXor});
  return counts;
}

/// (3), (4), (5)
void StagedSave::Plan::write_anywhere() {
  std::deque<Output> outputs = this->outputs();
  Output& output = outputs.front();
  const std::vector<bool> shared = group::ranks_of(group()).moves_blocks()
                                       ? have_short_runs(*layout)
                                       : std::vector<bool>(layout->tensors().size(), false);
  StripeWriter stripes(group(), ranks.timeout(), mine, *layout, output,
                       plan_rounds(*layout, shared, ranks.size(), false), false);
  std::vector<Mine> alone;
  std::copy_if(mine.begin(), mine.end(), std::back_inserter(alone),
               [&](const Mine& one) { return !shared[one.tensor]; });
  Direct direct(alone, *layout, outputs, false);
  ranks.work(layout->total(), [&] {
    const group::Part striped = stripes.round();  // while any rank has one
    if (!striped.last) return striped;
    group::Part part = direct.part();
    part.bytes += striped.bytes;
    if (part.last) {  // a rank finishes what it has written before it tells that this was its last part
      for (Output& one : outputs) one.finish();
      for (size_t i = 1; i < outputs.size(); ++i) output.add(outputs[i]);
    }
    return part;
  });
  written = output.written();
  commit([&] { group::join_on_first(group(), counts(output), patience()); },
         [&] {
           if (producer != nullptr && producer->check) producer->check();
           ranks.tell_progress();
           if (options.checksums) layout->set_checksums(output.crcs());
           for (const FilePlan& file : layout->files()) write_header(target->file(file.name), file);
         });
}

/// Headers come first here, so that checksums are counted before anything is written.
void StagedSave::Plan::write_in_sequence() {
  if (ranks.size() > 1 && !group::ranks_of(group()).moves_blocks()) {
    base::fail(Code::kUnsupported,
               "{}: this storage takes files only from front to end, and these ranks cannot send each other what one "
               "of them would write; "
               "save elsewhere, or with a process group for CPU tensors (cpu:gloo,cuda:nccl)",
               target->path.string());
  }
  std::deque<Output> outputs = this->outputs();
  Output& output = outputs.front();
  const auto join_and_check = [&] {
    agree(group(), ranks.deadline(), [&] {
      group::join_on_first(group(), counts(output), patience());
      if (ranks.rank() == 0 && producer != nullptr && producer->check) producer->check();
    });
  };
  if (options.checksums) {
    Direct count(mine, *layout, outputs, true);
    group::CollectiveCall(group(), ranks.timeout()).work(layout->total(), [&] { return count.part(); });
    for (size_t i = 1; i < outputs.size(); ++i) output.add(outputs[i]);
    join_and_check();
    group::ranks_of(group()).broadcast(std::as_writable_bytes(std::span(output.crcs())), 0, ranks.deadline());
    layout->set_checksums(output.crcs());
  }
  const std::vector<bool> all(layout->tensors().size(), true);
  StripeWriter stripes(group(), ranks.timeout(), mine, *layout, output, plan_rounds(*layout, all, ranks.size(), true),
                       true);
  ranks.work(layout->total(), [&] {
    const group::Part part = stripes.round();
    if (part.last) output.finish();
    return part;
  });
  if (!options.checksums && producer != nullptr) join_and_check();
  written = output.written();
  commit([] {}, [&] { ranks.tell_progress(); });
}

/// (6). `join`: what all ranks do for rank 0, `before`: what that does before it publishes.
void StagedSave::Plan::commit(const std::function<void()>& join, const std::function<void()>& before) {
  const std::string names = ranks.step(
      [&] {
        join();
        if (ranks.rank() != 0) return std::string();
        before();
        Staging::Texts texts{options.texts, {}};
        const auto given = texts.beside.extract(options.commit);
        texts.list = [&](const std::vector<std::string>& names, const std::set<std::string>& replaced) {
          return list_text(*target, *layout, given.empty() ? "" : given.mapped(), names, replaced);
        };
        group::Sender out;
        for (const std::string& name : staging->commit(texts)) out.text(name);
        staging.reset();
        return out.bytes();
      },
      [](const auto& by_rank) { return by_rank.front(); });
  group::Receiver in(names);
  for (size_t f = 0; f < layout->files().size(); ++f) layout->rename_file(f, in.text());
}

void StagedSave::Plan::give_up() noexcept {
  if (staging) staging->discard();
  staging.reset();
}

SaveReport StagedSave::Plan::report() const {
  SaveReport report;
  for (const FilePlan& file : layout->files())
    report.files.push_back(target->directory ? target->path / file.name : target->path);
  report.bytes_written = written;
  report.seconds = base::seconds_since(begin);
  return report;
}

StagedSave::StagedSave(Group& group, std::span<const SaveFile> files, const std::filesystem::path& path,
                       const SaveOptions& options)
    : StagedSave(group, {[&] {
                   return Request{{files.begin(), files.end()}, path, options};
                 }},
                 options.timeout) {}

StagedSave::StagedSave(Group& group, const SaveCall& call, std::chrono::milliseconds timeout)
    : plan_(new Plan{timed_calls(group, timeout), {group, timeout}, call.producer}) {
  Plan& plan = *plan_;
  const base::CallsTo here(plan.timed.get());
  plan.call = same_call(plan.ranks, call);  // (1)
  const std::vector<SaveFile>& files = plan.call.request.files;
  const base::Path& path = plan.call.request.path;
  const SaveOptions& options = plan.call.request.options;
  plan.options = options;
  plan.ranks.set_progress(options.progress);
  plan.hugging_face = files.size() == 1 && files[0].name.empty();
  const bool directory = makes_directory(files, path);
  const std::vector<Tensors>& tensors = plan.call.tensors;
  std::vector<Volume> volumes;
  for (size_t f = 0; f < files.size(); ++f) {
    check_whole(*tensors[f]);
    volumes.push_back({files[f].name, tensors[f], plan.call.metadata.at(f)});
  }
  plan.layout.emplace(volumes, options);
  if (!directory && plan.layout->files().size() > 1) {
    base::fail(Code::kInvalidArgument, "{}: {} files do not fit into one name; for max_shard_size give a directory",
               path.string(), plan.layout->files().size());
  }
  plan.target = base::in_our_words([&] {
    const bool several = files.size() > 1 && options.commit.empty();
    return target_for(path, directory, plan.hugging_face,
                      !directory          ? ""
                      : plan.hugging_face ? kIndexName
                      : several           ? kAveragesName
                                          : options.commit);
  });
  plan.target->nonce = plan.call.nonce;
  plan.target->host = plan.call.host;
  plan.mine = own_parts(group.rank(), *plan.layout, tensors, files, call.producer);
  plan.call.request = {};
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
    base::fail(Code::kInvalidArgument, "{}: stage() comes once, before write()", plan.target->path.string());
  if (memory.size() < staging_bytes())
    base::fail(Code::kInvalidArgument, "{}: {} bytes of staging memory; {} are needed", plan.target->path.string(),
               memory.size(), staging_bytes());
  plan.staged = true;
  const base::CallsTo here(plan.timed.get());
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
               plan.target->path.string());
  const base::CallsTo here(plan.timed.get());
  try {
    plan.open();
    if (plan.target->random_writes && plan.target->renames) {
      plan.write_anywhere();
    } else {
      plan.write_in_sequence();
    }
  } catch (const Error& error) {
    plan.give_up();
    say_where(error, plan.target->path);
    throw;
  } catch (...) {
    plan.give_up();
    throw;
  }
  return plan.report();
}

std::unique_ptr<StagedSave> SaveCall::begin(Group& group, std::chrono::milliseconds timeout) const {
  return std::unique_ptr<StagedSave>(new StagedSave(group, *this, timeout));
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

#include "file/save_plan.h"

#include <algorithm>

#include "base/errors.h"
#include "comm/parts.h"
#include "file/small_files.h"
#include "file/stripe_writer.h"

namespace shardow {

using namespace file;

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
  for (int i = 0; i < (produced ? producer->threads : 1); ++i)
    outputs.emplace_back(*layout, *draft, options.checksums, produced);
  return outputs;
}

/// (3), (4), (5)
void StagedSave::Plan::write_anywhere() {
  std::deque<Output> outputs = this->outputs();
  Output& output = outputs.front();
  comm::Parts parts(group, options.timeout, layout->total(), options.progress);
  const std::vector<bool> shared =
      group.moves_blocks() ? have_short_runs(*layout) : std::vector<bool>(layout->tensors().size(), false);
  std::vector<Mine> alone;
  std::copy_if(mine.begin(), mine.end(), std::back_inserter(alone),
               [&](const Mine& one) { return !shared[one.tensor]; });
  Direct direct(alone, *layout, outputs, false);
  parts.run([&] { return direct.part(); });
  StripeWriter stripes(group, options.timeout, mine, *layout, output, plan_rounds(*layout, shared, group.size(), false),
                       false);
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
               "{}: this storage takes files only from front to end, and these ranks cannot send each other what one "
               "of them would write; "
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
  StripeWriter stripes(group, options.timeout, mine, *layout, output, plan_rounds(*layout, all, group.size(), true),
                       true);
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
  if (hugging_face && (layout->files().size() > 1 || (draft->in_place && draft->directory)))
    write_index(*draft, *layout);
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
  if (base::syscalls().left_one())
    return release(*draft);  // the next save removes what storage that stands still has of this one
  discard(*draft);
}

SaveReport StagedSave::Plan::report() const {
  SaveReport report;
  for (const FilePlan& file : layout->files())
    report.files.push_back(draft->directory ? draft->target / file.name : draft->target);
  report.bytes_written = written;
  report.seconds = base::seconds_since(begin);
  return report;
}

}  // namespace shardow

// What one save works with, and its steps; they are numbered as in docs/durability.md.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/seconds.h"
#include "file/call.h"
#include "file/direct.h"
#include "file/environment.h"
#include "file/producer.h"
#include "file/publish.h"
#include "file/timed.h"
#include "shardow/checkpoint.h"

namespace shardow {

struct StagedSave::Plan {
  std::unique_ptr<base::TimedCalls> timed;  ///< where calls are the machine's own
  Group& group;
  SaveOptions options;
  const file::Producer* producer;  ///< of what has no memory; may be null
  bool hugging_face;               ///< files are named by us, and have an index where there are several
  file::Call call;
  std::optional<file::Layout> layout;
  std::optional<file::Draft> draft;
  std::vector<file::Mine> mine;
  int64_t written = 0;
  base::Time begin;
  Environment machine{timed.get()};
  bool staged = false, begun = false;

  const Environment* environment() const { return timed ? &machine : nullptr; }
  Deadline deadline() const { return base::now() + options.timeout; }
  Deadline patience() const {
    return base::now() + options.timeout * 3 / 4;
  }  ///< with another save; the ranks wait meanwhile
  file::Storage storage();
  std::deque<file::Output> outputs() const;
  void write_anywhere();
  void write_in_sequence();
  void commit();
  void give_up() noexcept;
  SaveReport report() const;
};

}  // namespace shardow

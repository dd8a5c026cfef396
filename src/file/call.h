// What was asked for: checked on each rank, and the same on all.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "file/header.h"
#include "file/ownership.h"
#include "file/producer.h"
#include "group/agree.h"
#include "group/facts.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// Throws kInvalidArgument where a view's data is null. Local.
void check_memory(std::span<const TensorView> views);

/// Files to save, and where, as one rank is asked to.
struct Request {
  std::vector<SaveFile> files;
  std::filesystem::path path;
  SaveOptions options;
  group::Facts facts = {};  ///< what else must be equal on all ranks
};

/// A save by what its ranks find out within its first round.
struct SaveCall {
  std::function<Request()> request;    ///< of a rank; what it throws all throw
  const Producer* producer = nullptr;  ///< of what has no memory
  group::Comparison compared = {};     ///< beside requests, after request()
  /// On every rank, of what `compared` came to: more metadata of each file, the same on all ranks. May be collective.
  std::function<std::vector<Metadata>(const std::string&)> metadata = {};
  const char* name = "save()";  ///< in messages about ranks that ask for other things

  /// Makes the save, whose steps have `timeout` each. Collective.
  std::unique_ptr<StagedSave> begin(Group& group, std::chrono::milliseconds timeout) const;
};

/// What all ranks know of a call when it has begun.
struct Call {
  Request request;    ///< this rank's
  std::string nonce;  ///< rank 0's, of this save alone
  std::string host;   ///< rank 0's
  bool several_hosts;
  std::vector<Metadata> metadata;                                   ///< of each file, rank 0's
  std::vector<std::shared_ptr<const std::vector<Shared>>> tensors;  ///< of each file, ascending by name
};

/// Throws kInvalidArgument or kUnsupported for what no save can do, and kInvalidArgument where ranks differ in anything
/// but which parts of tensors they hold and metadata, naming what differs; on every rank. One round, and another where
/// ranks have different tensors. Collective.
Call same_call(Group& group, const SaveCall& call, std::chrono::milliseconds timeout);

/// Whether a save to `path` makes a directory: where it is of files with names, or the path names none.
bool makes_directory(std::span<const SaveFile> files, const std::filesystem::path& path);

}  // namespace shardow::file

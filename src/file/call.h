// The first round of a save: what was asked for is checked on each rank, and the same on all.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "file/header.h"
#include "file/ownership.h"
#include "file/save_request.h"
#include "group/collective_call.h"

namespace shardow::file {

/// A save by what its ranks find out within its first round.
struct SaveCall {
  std::function<Request()> request;              ///< of a rank; what it throws all throw
  const Producer* producer = nullptr;            ///< of what has no memory
  group::CollectiveCall::Prepare compared = {};  ///< beside requests, after request()
  /// Returns on every rank, when `compared` is, more metadata of each file, the same on all ranks. May be collective.
  std::function<std::vector<Metadata>()> metadata = {};
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

/// Throws what check_request() does, and kInvalidArgument where ranks differ in anything but which parts of tensors
/// they hold and metadata, naming what differs; on every rank. One round, and another where ranks have different
/// tensors. Collective.
Call same_call(group::CollectiveCall& ranks, const SaveCall& call);

}  // namespace shardow::file

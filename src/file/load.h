// Loading from a catalog that has been read before.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "file/catalog.h"
#include "file/ownership.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// What a rank asks for beside tensors, in bits: what one rank asks for, all do.
constexpr int64_t kStrict = 1, kVerify = 2, kCheckOnly = 4, kProgress = 8;

/// Compares what ranks ask for.
class Asked final : public group::Comparison {
 public:
  explicit Asked(int64_t own) : bits(own) {}
  explicit Asked(const LoadOptions& options);

  std::string words() override { return std::to_string(bits); }
  std::string sum_up(const std::vector<std::string>& by_rank) const override;
  void take(group::CollectiveCall& /*call*/, const std::string& total) override { bits = std::stoll(total); }
  bool has(int64_t bit) const { return (bits & bit) != 0; }

  int64_t bits;  ///< this rank's; all ranks', once they are taken
};

/// What a rank wants of a checkpoint. `strict`: as LoadOptions::strict, in place of it.
struct Chosen {
  std::vector<TensorView> views;
  bool strict;
};

/// A load of one or several files by what its ranks find out on the way. What one rank throws is thrown on all; until
/// `begin` nothing has been changed. Three rounds, if everybody is done within the time of a part and nobody asks for
/// progress: what is there; who wants what; the bytes.
struct LoadCall {
  group::CollectiveCall::Prepare compared = {};  ///< in the first round
  std::function<Location()> find;                ///< on rank 0, after that
  Catalogs open = {};                            ///< in place of it: files that all ranks have open
  /// What this rank wants of each file, in their order; again where the files have been replaced meanwhile.
  std::function<std::vector<Chosen>(const std::string& words, const Catalogs& catalogs)> choose;
  std::function<void(const std::vector<LoadReport>&)> begin = {};  ///< when all is known to fit
  std::function<void()> end = {};  ///< when this rank has read what it wants; others may fail yet

  /// Reports by file. Collective.
  std::vector<LoadReport> run(Group& group, const LoadOptions& options) const;
};

/// Of one file, into `views`, which outlive it; its find() or `open` are not yet set.
LoadCall load_of(std::span<const TensorView> views, bool strict);

/// Tensors that ranks want, beside those that they are read from.
struct Match {
  std::vector<const Stored*> stored;  ///< of each wanted one, or null
  LoadReport report = {};             ///< what is missing and unexpected
};

/// Looks for `wanted`, ascending by name, among `tensors`, which are in `place` ("the file"). Throws kInvalidArgument
/// with everything that does not fit, in one message that begins with `what`: the same on every rank.
Match match(const std::vector<Shared>& wanted, const StoredTensors& tensors, bool strict, const std::string& what,
            const char* place);

/// Fills `view` from `stored`, and returns what its bytes contribute to the tensor's checksum where it is `summed`.
/// Local. Throws kIo with ESTALE where the file was written over.
uint64_t read_summed(const Catalog& catalog, const Stored& stored, const TensorView& view, bool summed);

/// Fills `view` from the tensor of its name, converting its dtype; compares the checksum where the file carries one and
/// all is read. Local. Throws kNotFound, kInvalidArgument, kCorrupt, and kIo with ESTALE where the file was written
/// over.
void read_one(const Catalog& catalog, const TensorView& view);

}  // namespace shardow::file

// Star: a Meeting over messages alone, where no memory is shared that could hold a verdict. docs/architecture.md says
// how it compares.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/verdicts.h"
#include "mpi/mail.h"
#include "shardow/custom_group.h"

namespace shardow::over_mpi {

/// How long past its deadline a rank waits for the keeper's verdict where it has promised to; only a keeper that died
/// or stands still during the round takes that long.
inline constexpr std::chrono::seconds kGrace{5};

class Star final : public Meeting {
 public:
  explicit Star(std::unique_ptr<Mail> mail, std::chrono::milliseconds grace = kGrace)
      : mail_(std::move(mail)),
        grace_(grace),
        everybody_(static_cast<size_t>(mail_->size())),
        gone_(everybody_.size(), false) {
    std::iota(everybody_.begin(), everybody_.end(), 0);
  }

  int rank() const noexcept override { return mail_->rank(); }
  int size() const noexcept override { return mail_->size(); }
  std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) override;

 private:
  enum class Word : int64_t;
  struct Verdict {
    std::optional<comm::Failure> failure;
    std::shared_ptr<const Bytes> bytes;
  };
  /// What is known of a round here. Letters may come before this rank does.
  struct Round {
    bool here = false;                     // the keeper has come
    bool promised = false;                 // this rank waits for the keeper's verdict, and does not give up by itself
    bool hurried = false;                  // a member that promised is at its deadline
    std::optional<comm::Failure> refusal;  // a member that did not promise has given up: the round will not be complete
    std::optional<Verdict> verdict;
    std::vector<std::optional<std::string>> offers;  // the keeper's: the bytes of members that came
  };
  struct Rounds {
    uint64_t ended = 0;  // rounds before this one are over, and letters about them are late
    std::map<uint64_t, Round> open;
  };
  struct Turn;  // this rank's part in one round

  void keep(Turn& turn);
  void follow(Turn& turn);
  void give_up(Turn& turn);
  void decide(Turn& turn, std::optional<comm::Failure> failure);
  void refuse(Turn& turn, comm::Failure failure);
  void tell_others(const Turn& turn, Word word, const std::optional<comm::Failure>& failure, const Bytes& texts);
  void tell(const Turn& turn, Word word, const Bytes& texts);  // the keeper
  static std::string letter(const Turn& turn, Word word, const std::optional<comm::Failure>& failure,
                            const Bytes& texts);
  std::optional<int> gone_before_it_came(const Turn& turn) const;
  bool read_letters();
  void read(const Letter& letter);
  void see_off(Deadline until);

  Deadline beyond(Deadline deadline) const;

  const std::unique_ptr<Mail> mail_;
  const std::chrono::milliseconds grace_;
  std::vector<int> everybody_;
  std::vector<bool> gone_;
  std::map<Lane, Rounds> rounds_;
};

}  // namespace shardow::over_mpi

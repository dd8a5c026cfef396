// Groups of a stranger's, written from the headers and docs/cpp.md alone, before the judge: groups store|meeting RANKS
// DIRECTORY
#include <fcntl.h>
#include <shardow/custom_group.h>
#include <shardow/error.h>
#include <sys/file.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

namespace fs = std::filesystem;
using shardow::Code, shardow::Deadline, shardow::Error, shardow::Group, shardow::Meeting;

/// A file for each key.
class Files final : public shardow::Store {
 public:
  Files(fs::path directory, int rank)
      : directory_(std::move(directory)), draft_(directory_ / ("draft-" + std::to_string(rank))) {}

  void set(const std::string& key, const std::string& value) override {
    write(value);
    fs::rename(draft_, at(key));
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    write(value);
    std::error_code taken;
    fs::create_hard_link(draft_, at(key), taken);
    fs::remove(draft_);  // it may be the key's file now
    return read(key);
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(read(key));
    return values;
  }
  bool has(const std::string& key) override { return fs::exists(at(key)); }
  bool wait(const std::vector<std::string>& keys, Deadline deadline) override {
    for (const std::string& key : keys) {
      while (!has(key)) {
        if (std::chrono::steady_clock::now() >= deadline) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return true;
  }
  int64_t add(const std::string& key) override {
    const int lock = ::open((directory_ / "lock").c_str(), O_CREAT | O_RDWR, 0600);
    ::flock(lock, LOCK_EX);
    const int64_t count = (has(key) ? std::stoll(read(key)) : 0) + 1;
    set(key, std::to_string(count));
    ::close(lock);
    return count;
  }
  void erase(const std::string& key) override { fs::remove(at(key)); }

 private:
  fs::path at(const std::string& key) const {
    std::string name = "key-";
    for (const char c : key)
      name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? std::string(1, c) : "%" + std::to_string(c);
    return directory_ / name;
  }
  void write(const std::string& value) const { std::ofstream(draft_, std::ios::binary) << value; }
  std::string read(const std::string& key) const {
    std::ifstream file(at(key), std::ios::binary);
    if (!file) throw Error(Code::kPeerFailed, key + " is gone");
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const fs::path directory_, draft_;
};

struct Round {
  std::map<int, std::string> came;
  std::shared_ptr<const Meeting::Bytes> all;  // where it succeeded
  std::string missing;                        // where it failed
  Code code = Code::kTimeout;

  bool ended() const { return all != nullptr || !missing.empty(); }
};

struct Hall {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<Meeting::Lane, uint64_t>, Round> rounds;
  std::set<int> gone;
};

/// Threads that meet in a hall. Who finds that a round can't go on ends it for all.
class Table final : public Meeting {
 public:
  Table(Hall& hall, int rank, int size) : hall_(hall), rank_(rank), size_(size) {}
  ~Table() override {
    const std::lock_guard lock(hall_.mutex);
    hall_.gone.insert(rank_);
    hall_.changed.notify_all();
  }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  std::shared_ptr<const Bytes> meet(const Lane& lane, Offer offer, Deadline deadline) override {
    std::unique_lock lock(hall_.mutex);
    Round& round = hall_.rounds[{lane, turns_[lane]++}];
    if (!round.ended()) round.came[rank_] = std::move(offer.bytes);
    if (!round.ended() && round.came.size() == lane.members.size()) {
      Bytes all;
      for (const int member : lane.members) all.push_back(round.came[member]);
      round.all = std::make_shared<const Bytes>(std::move(all));
      hall_.changed.notify_all();
    }
    for (bool late = false; !round.ended();) {
      std::string missing;
      bool lost = false;
      for (const int member : lane.members) {
        if (round.came.contains(member)) continue;
        missing += " " + std::to_string(member);
        lost = lost || hall_.gone.contains(member);
      }
      if (lost || late) {
        round.missing = missing;
        round.code = lost ? Code::kPeerFailed : Code::kTimeout;
        hall_.changed.notify_all();
      } else {
        late = hall_.changed.wait_until(lock, deadline) == std::cv_status::timeout;
      }
    }
    if (round.all == nullptr) throw Error(round.code, offer.call + ": missing ranks:" + round.missing);
    return round.all;
  }

 private:
  Hall& hall_;
  const int rank_, size_;
  std::map<Lane, uint64_t> turns_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const bool by_store = std::string(argv[1]) == "store";
  const int size = std::atoi(argv[2]);
  Hall hall;
  std::mutex printing;
  int wrong = 0;
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      const std::unique_ptr<Group> group =
          by_store ? shardow::store_group(std::make_unique<Files>(argv[3], rank), rank, size)
                   : shardow::meeting_group(std::make_unique<Table>(hall, rank, size));
      for (const shardow::GroupCheck& check : shardow::group_checks()) {
        for (const std::string& one : check.run(*group)) {
          const std::lock_guard lock(printing);
          std::printf("%s: %s\n", check.name.c_str(), one.c_str());
          ++wrong;
        }
      }
    });
  }
  ranks.clear();
  std::printf("%zu checks on %d ranks: %d wrong\n", shardow::group_checks().size(), size, wrong);
  return wrong == 0 ? 0 : 1;
}

// Updates of a run as they are made, and how a snapshot's record spells them: few stretches as lists of numbers, many
// as a text of two or three bytes for each update. docs/posthoc.md has the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace shardow::posthoc {

inline constexpr int64_t kMostUpdates =
    100'000'000;  // more would take minutes to go through, and nobody has made as many
inline constexpr int64_t kMostStretches = 1'000'000;  // of all that a directory's records tell: 40 MB
inline constexpr int64_t kMostSteps = int64_t{1} << 53;

/// Updates at even distances.
struct Stretch {
  int64_t first, every, count;
  double samples = 0;        ///< training samples seen at the first
  double samples_every = 0;  ///< and between two

  int64_t last() const noexcept { return first + every * (count - 1); }
  double samples_at_last() const noexcept { return samples + samples_every * static_cast<double>(count - 1); }
  Stretch until(int64_t step) const noexcept;  ///< without the updates after `step`, which is not before the first
  bool operator==(const Stretch&) const = default;
};

/// Stretches one after another. Immutable; copies, and those up to a step, share one memory.
class Stretches {
 public:
  Stretches() = default;
  Stretches(std::vector<Stretch> all);
  Stretches(std::initializer_list<Stretch> all) : Stretches(std::vector(all)) {}

  bool empty() const noexcept { return size_ == 0; }
  size_t size() const noexcept { return size_; }
  Stretch operator[](size_t i) const noexcept { return i + 1 == size_ ? last_ : (*all_)[i]; }
  Stretches until(int64_t step) const;
  bool operator==(const Stretches& other) const noexcept;

  const std::vector<Stretch>* memory() const noexcept { return all_.get(); }  ///< that is shared; may hold more

 private:
  std::shared_ptr<const std::vector<Stretch>> all_;
  size_t size_ = 0;
  Stretch last_{};  // as far as it counts
};

/// Adds the update that comes next: to the last stretch where it goes on with that. Who adds the same updates has the
/// same stretches.
void add_update(std::vector<Stretch>& stretches, int64_t step, double samples);

/// Stretches as a text, each once it is over.
class PackedText {
 public:
  /// `every`, `samples_every`: what most updates are near; nothing: samples are not told.
  PackedText(int64_t every, std::optional<int64_t> samples_every);

  void add(const Stretch& stretch);
  const std::string& text() const noexcept { return text_; }

 private:
  void add_update(int64_t step, double samples);
  void add_number(int64_t number);

  int64_t every_, samples_every_;
  bool in_samples_;
  int64_t step_ = 0;  // of the update before
  double samples_ = 0;
  std::string text_;
};

/// Throws kCorrupt, saying why: no such text, updates that no run can have made; kUnsupported: more than kMostUpdates,
/// kMostStretches.
std::vector<Stretch> unpacked(std::string_view text);

/// Updates one after another. Memory and time do not grow with those that lie at even distances.
class RecordedUpdates {
 public:
  /// `in_samples`: whether training samples are told.
  explicit RecordedUpdates(bool in_samples) : in_samples_(in_samples) {}

  void add(int64_t step, double samples);
  void add_evenly(int64_t first, int64_t every, int64_t count);  ///< without samples
  bool empty() const noexcept { return stretches_.empty(); }

  /// An object with what a segment has of them: {"updates":[[1,1,9]]}, or of many stretches
  /// {"packed":{"crc32":"..","text":".."}}.
  std::string to_json() const;

 private:
  void pack();

  bool in_samples_;
  std::vector<Stretch> stretches_;  // all of them; of those that are packed the last, which may go on
  std::optional<PackedText> packed_;
};

}  // namespace shardow::posthoc

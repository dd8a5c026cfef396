// A packed text is "#" where samples are told, "." where not, then numbers and signs. Numbers are those of source maps
// (base64 VLQ): five bits a letter, the lowest first, the sixth says that another one follows; the lowest bit of all is
// the sign.
//
//   #  every  samples_every  then for each update   ["-" steps - every]  samples - samples_every, or "=" samples in all
//   ";" .  every                 then for each update   steps - every
//   "*" n                    n more updates as far apart as the last two
//
// with the steps and samples since the update before, at first since 0.
#include "posthoc/updates.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>

#include "base/errors.h"
#include "file/crc.h"

namespace shardow::posthoc {
namespace {

constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr size_t kMostLists = 16;      // stretches that are spelled as lists, which earlier versions read
constexpr double kMostApart = 0x1p31;  // samples between two updates that are told as a difference

[[noreturn]] void damaged(std::string_view why) {
  base::fail(Code::kCorrupt, "packed updates: {}", why);
}

class PackedReader {
 public:
  explicit PackedReader(std::string_view text) : text_(text) {
    in_samples_ = take() == '#';
    if (!in_samples_ && text[0] != '.') damaged("the text begins with neither # nor .");
    every_ = number();
    samples_every_ = in_samples_ ? number() : 0;
  }

  std::vector<Stretch> all() {
    while (at_ < text_.size()) {
      if (text_[at_] == '*') {
        ++at_;
        repeat(number());
      } else {
        next();
      }
      if (static_cast<int64_t>(found_.size()) > kMostStretches)
        base::fail(Code::kUnsupported, "packed updates: more than {} stretches of them", kMostStretches);
    }
    return std::move(found_);
  }

 private:
  char take() {
    if (at_ == text_.size()) damaged("the text ends within an update");
    return text_[at_++];
  }

  int64_t number() {
    uint64_t bits = 0;
    for (int shift = 0;; shift += 5) {
      const size_t letter = kLetters.find(take());
      if (letter == std::string_view::npos) damaged(fmt::format("no number at byte {}", at_ - 1));
      if (shift > 55) damaged(fmt::format("a number at byte {} that is too large", at_ - 1));
      bits |= static_cast<uint64_t>(letter & 31) << shift;
      if (letter < 32) break;
    }
    const auto size = static_cast<int64_t>(bits >> 1);
    return (bits & 1) != 0 ? -size : size;
  }

  double samples_in_all() {
    const size_t end = text_.find(';', at_);
    if (end == std::string_view::npos) damaged("the text ends within a number");
    double samples = 0;
    const auto [rest, error] = std::from_chars(text_.data() + at_, text_.data() + end, samples);
    if (error != std::errc() || rest != text_.data() + end) damaged(fmt::format("no number at byte {}", at_));
    at_ = end + 1;
    return samples;
  }

  void next() {
    const double before = found_.empty() ? 0 : found_.back().samples_at_last();
    int64_t apart = every_;
    double samples = 0;
    if (!in_samples_) {
      apart += number();
    } else {
      if (text_[at_] == '-') {
        ++at_;
        apart += number();
      }
      const bool in_all = at_ < text_.size() && text_[at_] == '=';
      if (in_all) ++at_;
      samples = in_all ? samples_in_all() : before + static_cast<double>(samples_every_ + number());
    }
    const int64_t step = found_.empty() ? 0 : found_.back().last();
    if (apart < 1 || apart >= kMostSteps - step) damaged(fmt::format("an update {} steps after step {}", apart, step));
    if (!(samples >= before) || !std::isfinite(samples)) damaged(fmt::format("{} samples after {}", samples, before));
    posthoc::add_update(found_, step + apart, samples);
  }

  void repeat(int64_t more) {
    if (found_.empty() || found_.back().count < 2 || more < 1) damaged("a repetition of what is not there");
    Stretch& last = found_.back();
    if (more > kMostUpdates) base::fail(Code::kUnsupported, "packed updates: more than {} of them", kMostUpdates);
    if (last.count + more > (kMostSteps - last.first) / last.every)
      damaged(fmt::format("{} updates after step {}", more, last.last()));
    last.count += more;
    if (!std::isfinite(last.samples_at_last())) damaged(fmt::format("{} samples between updates", last.samples_every));
  }

  std::string_view text_;
  size_t at_ = 0;
  bool in_samples_ = false;
  int64_t every_ = 0, samples_every_ = 0;
  std::vector<Stretch> found_;
};

}  // namespace

Stretch Stretch::until(int64_t step) const noexcept {
  const int64_t left = std::min(count, (step - first) / every + 1);
  if (left == 1) return {first, 1, 1, samples, 0};  // as it was told when it was alone
  return {first, every, left, samples, samples_every};
}

Stretches::Stretches(std::vector<Stretch> all) : size_(all.size()) {
  if (all.empty()) return;
  last_ = all.back();
  all_ = std::make_shared<const std::vector<Stretch>>(std::move(all));
}

Stretches Stretches::until(int64_t step) const {
  Stretches cut = *this;
  const auto begin = empty() ? std::vector<Stretch>::const_iterator() : all_->begin();
  const auto end = std::partition_point(begin, begin + static_cast<ptrdiff_t>(size_),
                                        [&](const Stretch& one) { return one.first <= step; });
  cut.size_ = static_cast<size_t>(end - begin);
  if (cut.empty()) return {};
  cut.last_ = (*this)[cut.size_ - 1].until(step);
  return cut;
}

bool Stretches::operator==(const Stretches& other) const noexcept {
  if (size_ != other.size_) return false;
  if (empty()) return true;
  const size_t whole = size_ - 1;
  return last_ == other.last_ &&
         (all_ == other.all_ || std::equal(all_->data(), all_->data() + whole, other.all_->data()));
}

void add_update(std::vector<Stretch>& stretches, int64_t step, double samples) {
  if (!stretches.empty()) {
    Stretch& last = stretches.back();
    const bool second = last.count == 1;
    if (second) last.every = step - last.first, last.samples_every = samples - last.samples;
    if (second || (step == last.first + last.every * last.count &&
                   samples == last.samples + last.samples_every * static_cast<double>(last.count))) {
      ++last.count;
      return;
    }
  }
  stretches.push_back({step, 1, 1, samples, 0});
}

PackedText::PackedText(int64_t every, std::optional<int64_t> samples_every)
    : every_(every),
      samples_every_(samples_every.value_or(0)),
      in_samples_(samples_every.has_value()),
      text_(in_samples_ ? "#" : ".") {
  add_number(every_);
  if (in_samples_) add_number(samples_every_);
}

void PackedText::add(const Stretch& stretch) {
  add_update(stretch.first, stretch.samples);
  if (stretch.count > 1) add_update(stretch.first + stretch.every, stretch.samples + stretch.samples_every);
  if (stretch.count > 2) {
    text_ += '*';
    add_number(stretch.count - 2);
  }
  step_ = stretch.last();
  samples_ = stretch.samples_at_last();
}

void PackedText::add_update(int64_t step, double samples) {
  const int64_t apart = step - step_ - every_;
  if (!in_samples_) {
    add_number(apart);
  } else {
    if (apart != 0) {
      text_ += '-';
      add_number(apart);
    }
    const double more = samples - samples_;
    if (std::fabs(more) < kMostApart && more == std::trunc(more) && samples_ + more == samples) {
      add_number(static_cast<int64_t>(more) - samples_every_);
    } else {
      text_ += fmt::format("={};", samples);
    }
  }
  step_ = step;
  samples_ = samples;
}

void PackedText::add_number(int64_t number) {
  uint64_t bits = (static_cast<uint64_t>(std::abs(number)) << 1) | (number < 0 ? 1 : 0);
  for (; bits > 31; bits >>= 5) text_ += kLetters[(bits & 31) | 32];
  text_ += kLetters[bits];
}

std::vector<Stretch> unpacked(std::string_view text) {
  if (text.empty()) damaged("the text is empty");
  return PackedReader(text).all();
}

void RecordedUpdates::add(int64_t step, double samples) {
  posthoc::add_update(stretches_, step, in_samples_ ? samples : 0);
  pack();
}

void RecordedUpdates::add_evenly(int64_t first, int64_t every, int64_t count) {
  for (int64_t k = 0; k < std::min<int64_t>(count, 3); ++k)
    add(first + k * every, 0);  // by the third they have that distance
  if (count > 3) stretches_.back().count += count - 3;
}

void RecordedUpdates::pack() {
  if (!packed_ && stretches_.size() <= kMostLists) return;
  if (!packed_) {
    int64_t every = kMostSteps, updates = 0;
    for (const Stretch& one : stretches_) {
      if (one.count > 1) every = std::min(every, one.every);
      updates += one.count;
    }
    const double mean = (stretches_.back().samples - stretches_.front().samples) / static_cast<double>(updates - 1);
    const auto near = std::fabs(mean) < kMostApart ? static_cast<int64_t>(std::llround(mean)) : 0;
    packed_.emplace(every, in_samples_ ? std::optional(near) : std::nullopt);
  }
  for (size_t i = 0; i + 1 < stretches_.size(); ++i) packed_->add(stretches_[i]);
  stretches_.erase(stretches_.begin(), stretches_.end() - 1);
}

std::string RecordedUpdates::to_json() const {
  if (packed_) {
    PackedText all = *packed_;
    all.add(stretches_.back());
    const uint32_t crc = file::crc32(0, std::as_bytes(std::span(all.text())));
    return fmt::format(R"({{"packed":{{"crc32":"{:08x}","text":"{}"}}}})", crc, all.text());
  }
  std::string lists;
  for (const Stretch& one : stretches_) {
    lists += fmt::format("{}[{},{},{}", lists.empty() ? "" : ",", one.first, one.every, one.count);
    if (in_samples_) lists += fmt::format(",{},{}", one.samples, one.samples_every);
    lists += "]";
  }
  return fmt::format(R"({{"updates":[{}]}})", lists);
}

}  // namespace shardow::posthoc

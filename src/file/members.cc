#include "file/members.h"

#include <algorithm>
#include <new>
#include <utility>

namespace shardow::file {

Members::Members(std::string_view json, size_t depth) : json_(json) {
  if (const auto error = parser_.allocate(4096, std::max<size_t>(depth, 1))) fail(error);
}

/// The next character that is no space, or NUL at the end, which no JSON has outside of texts either.
char Members::skip_space() {
  at_ = std::min(json_.find_first_not_of(" \t\n\r", at_), json_.size());
  return at_ < json_.size() ? json_[at_] : '\0';
}

/// From one quote behind its partner.
bool Members::skip_text() {
  for (++at_; at_ < json_.size(); ++at_) {
    at_ = std::min(json_.find_first_of("\"\\", at_), json_.size());
    if (at_ < json_.size() && json_[at_] == '"') return (++at_, true);
    ++at_;  // what a backslash escapes
  }
  return fail("a text that does not end");
}

/// Behind the value, whose own rules simdjson knows.
bool Members::skip_value() {
  const size_t begin = at_;
  size_t open = 0;
  do {
    at_ = open > 0 ? std::min(json_.find_first_of("\"[]{}", at_), json_.size()) : at_;
    if (at_ == json_.size()) return fail("it ends in the middle of a value");
    const char c = json_[at_];
    if (c == '"') {
      if (!skip_text()) return false;
    } else if (c == '[' || c == '{') {
      ++open;
      ++at_;
    } else if (c == ']' || c == '}') {
      if (open == 0) return fail("a value is missing");
      --open;
      ++at_;
    } else {
      at_ = std::min(json_.find_first_of(",} \t\n\r", at_), json_.size());
    }
  } while (open > 0);
  value_ = json_.substr(begin, at_ - begin);
  return true;
}

bool Members::fail(std::string why) {
  error_ = std::move(why);
  return false;
}

/// No memory is no fault of the text.
bool Members::fail(simdjson::error_code error) {
  if (error == simdjson::MEMALLOC) throw std::bad_alloc();
  return fail(simdjson::error_message(error));
}

bool Members::next() {
  if (!error_.empty()) return false;
  char c = skip_space();
  if (!std::exchange(begun_, true)) {
    if (c != '{') return fail("it is no JSON object");
    ++at_;
    c = skip_space();
  } else if (c == ',') {
    ++at_;
    if (skip_space() != '"') return fail("a comma without a member behind it");
    c = '"';
  } else if (c != '}') {
    return fail("its members are not separated by commas");
  }
  if (c == '}') {
    ++at_;
    if (skip_space(); at_ != json_.size()) return fail("something follows behind its end");
    return false;
  }
  if (c != '"') return fail("a member without a name");
  const size_t begin = at_;
  std::string_view name;
  if (!skip_text()) return false;
  if (const auto error = parser_.parse(json_.data() + begin, at_ - begin).get(name)) return fail(error);
  key_ = name;
  if (skip_space() != ':') return fail("a name without a value");
  ++at_;
  skip_space();
  return skip_value();
}

bool Members::parse(simdjson::dom::element& value) {
  const auto error = parser_.parse(value_.data(), value_.size()).get(value);
  return error == simdjson::SUCCESS || fail(error);
}

}  // namespace shardow::file

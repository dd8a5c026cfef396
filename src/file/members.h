// The members of a JSON object, one after another, so that reading a large one takes the memory of its largest member
// and not of a tree: simdjson takes 15 bytes for each byte of text that asks for it.
#pragma once

#include <simdjson.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace shardow::file {

constexpr size_t kMostDepth = 127;  // serde_json refuses 128

/// Walks a text that need not be valid: every byte of it is either checked here or in a member that is parsed. Not for
/// several threads.
class Members {
 public:
  /// `depth`: how deeply the object's values may be nested. `json` outlives it.
  Members(std::string_view json, size_t depth);

  /// Goes to the next member; false after the last, or where the text is no JSON object. Throws std::bad_alloc as
  /// parse() does.
  bool next();

  const std::string& key() const { return key_; }
  std::string_view text() const { return value_; }  ///< of the value, as it stands there

  /// Parses the value, which is valid until the next call of either. False where it is no JSON.
  bool parse(simdjson::dom::element& value);

  /// Why there is no next member; empty where the object has ended.
  const std::string& error() const { return error_; }

 private:
  char skip_space();
  bool skip_text();
  bool skip_value();
  bool fail(std::string why);
  bool fail(simdjson::error_code error);

  std::string_view json_;
  size_t at_ = 0;
  bool begun_ = false;
  std::string key_, error_;
  std::string_view value_;
  simdjson::dom::parser parser_;
};

}  // namespace shardow::file

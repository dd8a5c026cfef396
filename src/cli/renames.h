// New names for tensors, by rules FROM=TO.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace shardow::cli {

/// A rule is a name, or a pattern with one "*" that stands for any text, in FROM and in TO. The first rule that fits a
/// name is applied, once.
class Renames {
 public:
  explicit Renames(const std::vector<std::string>& rules);  ///< throws kInvalidArgument for what is no rule

  /// Old name by new name. Throws kInvalidArgument where two tensors would have one name, and for a rule that fits
  /// none.
  std::map<std::string, std::string> apply(const std::vector<std::string>& names) const;

 private:
  struct Rule {
    std::string text, before, after, new_before, new_after;
    bool has_star = false, new_has_star = false;

    bool fits(std::string_view name) const;
    std::string renamed(std::string_view name) const;
  };
  std::vector<Rule> rules_;
};

}  // namespace shardow::cli

#include "cli/renames.h"

#include <algorithm>

#include "base/errors.h"
#include "cli/text.h"

namespace shardow::cli {
namespace {

/// The text before and after the star; all of it before where there is none.
bool split(std::string_view pattern, std::string& before, std::string& after, std::string_view rule) {
  const size_t star = pattern.find('*');
  before = pattern.substr(0, star);
  if (star == std::string_view::npos) return false;
  after = pattern.substr(star + 1);
  if (after.find('*') != std::string::npos)
    base::fail(Code::kInvalidArgument, "rename '{}': one * on a side is the most", rule);
  return true;
}

}  // namespace

Renames::Renames(const std::vector<std::string>& rules) {
  for (const std::string& text : rules) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
      base::fail(Code::kInvalidArgument, "rename '{}' is not of the form FROM=TO", text);
    Rule rule;
    rule.text = text;
    rule.has_star = split(std::string_view(text).substr(0, equals), rule.before, rule.after, text);
    rule.new_has_star = split(std::string_view(text).substr(equals + 1), rule.new_before, rule.new_after, text);
    if (rule.new_has_star && !rule.has_star)
      base::fail(Code::kInvalidArgument, "rename '{}': the * on the right has none on the left", text);
    rules_.push_back(std::move(rule));
  }
}

bool Renames::Rule::fits(std::string_view name) const {
  if (!has_star) return name == before;
  return name.size() >= before.size() + after.size() && name.starts_with(before) && name.ends_with(after);
}

std::string Renames::Rule::renamed(std::string_view name) const {
  if (!new_has_star) return new_before;
  return new_before + std::string(name.substr(before.size(), name.size() - before.size() - after.size())) + new_after;
}

std::map<std::string, std::string> Renames::apply(const std::vector<std::string>& names) const {
  std::map<std::string, std::string> old_names;
  std::vector<bool> used(rules_.size());
  for (const std::string& name : names) {
    const auto rule = std::find_if(rules_.begin(), rules_.end(), [&](const Rule& one) { return one.fits(name); });
    if (rule != rules_.end()) used[static_cast<size_t>(rule - rules_.begin())] = true;
    const std::string renamed = rule == rules_.end() ? name : rule->renamed(name);
    const auto [there, added] = old_names.emplace(renamed, name);
    if (!added)
      base::fail(Code::kInvalidArgument, "'{}' and '{}' would both be called '{}'", shown(there->second), shown(name),
                 shown(renamed));
  }
  for (size_t i = 0; i < rules_.size(); ++i) {
    if (!used[i])
      base::fail(Code::kInvalidArgument, "rename '{}' fits no tensor that an earlier rule has left", rules_[i].text);
  }
  return old_names;
}

}  // namespace shardow::cli

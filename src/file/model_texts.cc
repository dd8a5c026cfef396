#include "file/model_texts.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/paths.h"

namespace shardow::file {
namespace {

using base::Path;

/// Returns whether transformers' from_pretrained() looks for a file of this name beside weights.
bool is_model_text(std::string_view name) {
  constexpr std::array<std::string_view, 6> kNames = {
      "config.json",       "merges.txt",         "special_tokens_map.json",
      "added_tokens.json", "chat_template.json", "chat_template.jinja"};
  constexpr std::array<std::string_view, 8> kBegins = {"tokenizer", "vocab",          "spiece.model",  "sentencepiece",
                                                       "modeling_", "configuration_", "tokenization_", "processing_"};
  constexpr std::array<std::string_view, 2> kEnds = {"_config.json", ".tiktoken"};
  const auto is = [&](std::string_view each) { return name == each; };
  const auto begins = [&](std::string_view each) { return name.starts_with(each); };
  const auto ends = [&](std::string_view each) { return name.ends_with(each); };
  return std::any_of(kNames.begin(), kNames.end(), is) || std::any_of(kBegins.begin(), kBegins.end(), begins) ||
         std::any_of(kEnds.begin(), kEnds.end(), ends);
}

}  // namespace

std::map<std::string, std::string> model_texts(const Checkpoint& weights, const Path& target) {
  const Path folder = base::parent_of(weights.files().front().path);
  std::map<std::string, std::string> texts;
  if (target.extension() == ".safetensors" || !base::look_at(folder / "config.json")) return texts;
  for (const std::string& name : base::names_in(folder)) {
    const auto source = is_model_text(name) ? base::look_at(folder / name) : std::nullopt;
    if (source && source->regular() && !base::look_at_itself(target / name))
      texts[name] = base::File::open(folder / name).text();
  }
  return texts;
}

}  // namespace shardow::file

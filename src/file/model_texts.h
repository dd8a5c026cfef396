// Files of the Hugging Face layout that a model is loaded with besides its weights: configuration, tokenizer, code.
#pragma once

#include <map>
#include <string>

#include "base/files.h"
#include "shardow/checkpoint.h"

namespace shardow::file {

/// Returns the contents, by name, of configuration, tokenizer and code files beside the weights, for a save of the same
/// model to `target`; of none where config.json is not among them, or `target` is one .safetensors file. Leaves out
/// names that `target` has. Throws kIo where a file can't be read.
std::map<std::string, std::string> model_texts(const Checkpoint& weights, const base::Path& target);

}  // namespace shardow::file

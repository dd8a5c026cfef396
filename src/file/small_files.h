// What one rank writes of a checkpoint when all data are on disk: headers, the index, texts.
#pragma once

#include <map>
#include <string>

#include "file/draft.h"
#include "file/header.h"
#include "file/layout.h"

namespace shardow::file {

/// Header after byte 8, then, when that is on disk, the length: until then no reader takes the file.
void write_header(const base::Path& path, const FilePlan& file_plan);

void write_index(const Draft& draft, const Layout& layout);

/// Where nothing can be renamed, what has its last text is whole.
void write_texts(Draft& draft, const std::map<std::string, std::string>& texts);

}  // namespace shardow::file

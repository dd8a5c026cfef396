#include "file/small_files.h"

#include "base/paths.h"
#include "file/index.h"

namespace shardow::file {

void write_header(const base::Path& path, const FilePlan& file_plan) {
  const std::string bytes = header_bytes(file_plan.content.entries, file_plan.metadata, file_plan.data_begin);
  const std::span<const std::byte> all = std::as_bytes(std::span(bytes));
  base::File file = base::File::open_for_writing(path);
  file.write(all.subspan(static_cast<size_t>(kLengthBytes)), kLengthBytes);
  file.sync();
  file.write(all.first(static_cast<size_t>(kLengthBytes)), 0);
  file.sync();
  file.close();
}

void write_index(const Draft& draft, const Layout& layout) {
  WeightMap weights;
  for (const FilePlan& file : layout.files()) {
    for (const Entry& entry : file.content.entries) weights[entry.name] = file.name;
  }
  const std::string bytes = index_bytes(weights, layout.total());
  base::File file = base::File::replace(draft.file(kIndexName));
  file.write(std::as_bytes(std::span(bytes)), 0);
  file.sync();
  file.close();
}

void write_texts(Draft& draft, const std::map<std::string, std::string>& texts) {
  for (const auto& [name, text] : texts) {
    const base::Path path = draft.file(name);
    if (draft.in_place && !base::look_at_itself(path)) draft.made_here.push_back(name);
    base::File file = base::File::replace(path);
    file.write(std::as_bytes(std::span(text)), 0);
    file.sync();
    file.close();
  }
}

}  // namespace shardow::file

#include "file/output.h"

#include "file/crc.h"

namespace shardow::file {

Output::Output(const Layout& layout, const Draft& draft, bool checksums)
    : layout_(layout), draft_(draft), checksums_(checksums), crcs_(layout.tensors().size(), 0), files_(layout.files().size()) {}

void Output::count(size_t tensor, int64_t begin, std::span<const std::byte> data) {
  if (!checksums_) return;
  const Entry& entry = layout_.place(tensor).entry;
  crcs_[tensor] ^= crc32_contribution(crc32(0, data), entry.end - entry.begin - begin - static_cast<int64_t>(data.size()));
}

void Output::write(size_t tensor, int64_t begin, std::span<const std::byte> data) {
  const Place& place = layout_.place(tensor);
  const FilePlan& plan = layout_.files()[place.file];
  auto& file = files_[place.file];
  if (!file) file = std::make_unique<base::File>(base::File::open_for_writing(draft_.file(plan.name)));
  file->write(data, plan.header.data_begin + place.entry.begin + begin);
  written_ += static_cast<int64_t>(data.size());
}

void Output::begin_file(size_t file) {
  if (files_[file]) return;
  const FilePlan& plan = layout_.files()[file];
  files_[file] = std::make_unique<base::File>(base::File::replace(draft_.file(plan.name)));
  const std::string header = header_bytes(plan.header);
  files_[file]->write(std::as_bytes(std::span(header)), 0);
}

void Output::finish() {
  for (auto& file : files_) {
    if (!file) continue;
    file->sync();
    file->close();
  }
}

}  // namespace shardow::file

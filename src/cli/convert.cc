// The same tensors in other files: another dtype, another number of files, other names. Bytes go from file to file,
// chunk by chunk.
#include <algorithm>

#include "base/errors.h"
#include "base/mutex.h"
#include "cli/exit_status.h"
#include "cli/lanes.h"
#include "cli/output.h"
#include "cli/renames.h"
#include "cli/sources.h"
#include "file/call.h"
#include "file/crc.h"
#include "file/model_texts.h"
#include "tensor/dtype.h"
#include "tensor/runs.h"

namespace shardow::cli {
namespace {

constexpr int kMostWriters = 8;  // threads: some 6 MiB each, and disks give no more to more of them

struct ConvertOptions {
  std::string input;
  std::vector<std::string> renames;
  OutputOptions output;
  int threads = 0;
};

/// Reads parts of tensors by their new names, and compares each tensor with its checksum when all of it was read.
class Parts {
 public:
  Parts(const Checkpoint& checkpoint, const std::map<std::string, std::string>& old_names)
      : checkpoint_(checkpoint), old_names_(old_names) {}

  void read(const TensorView& wanted) {
    check_interrupted();
    const std::string& name = old_names_.at(wanted.name);
    checkpoint_.read({name, wanted.dtype, wanted.region, wanted.data});
    const StoredTensor tensor = checkpoint_.tensor(name);
    if (!tensor.crc32 || dtype_bits(tensor.dtype) < 8) return;
    const int64_t width = dtype_bits(tensor.dtype) / 8;
    Sum part;
    RunCursor runs(wanted.region);
    while (const auto run = runs.next()) {
      const auto* const begin = static_cast<const std::byte*>(wanted.data) + run->local_begin * width;
      const uint32_t crc = file::crc32(0, {begin, static_cast<size_t>(run->length * width)});
      part.crc ^= file::crc32_contribution(crc, tensor.bytes - (run->global_begin + run->length) * width);
      part.bytes += run->length * width;
    }
    add(name, tensor, part);
  }

 private:
  struct Sum {
    uint32_t crc = 0;
    int64_t bytes = 0;
  };

  void add(const std::string& name, const StoredTensor& tensor, const Sum& part) {
    const base::Lock lock(mutex_);
    Sum& sum = sums_[name];
    sum.crc ^= part.crc;
    sum.bytes += part.bytes;
    if (sum.bytes < tensor.bytes) return;
    if (sum.crc != *tensor.crc32) {
      base::fail(Code::kCorrupt, "{}: '{}': its bytes have the CRC-32 {:08x}, the header says {:08x}",
                 checkpoint_.files()[tensor.file].path.string(), name, sum.crc, *tensor.crc32);
    }
    sums_.erase(name);
  }

  const Checkpoint& checkpoint_;
  const std::map<std::string, std::string>& old_names_;
  base::Mutex mutex_;
  std::map<std::string, Sum> sums_ SHARDOW_GUARDED_BY(mutex_);
};

int convert(const ConvertOptions& options) {
  const Checkpoint checkpoint = open_one(options.input);
  const std::map<std::string, std::string> old_names = Renames(options.renames).apply(checkpoint.names());
  std::vector<TensorView> views;
  for (const auto& [name, old_name] : old_names) {
    const StoredTensor tensor = checkpoint.tensor(old_name);
    views.push_back({name, tensor.dtype, Region::whole(tensor.shape), nullptr});
  }
  Parts parts(checkpoint, old_names);
  SaveOptions save_options;
  save_options.dtype = options.output.file_dtype();
  save_options.max_shard_size = options.output.shard_bytes();
  save_options.metadata = metadata_of(checkpoint);
  save_options.texts = file::model_texts(checkpoint, options.output.path);
  save_options.progress = watched("convert");
  file::Producer producer;
  producer.read = [&](const TensorView& wanted) { parts.read(wanted); };
  producer.threads = std::min(options.threads, kMostWriters);
  const auto request = [&] { return file::Request{{{"", views}}, options.output.path, save_options}; };
  const SaveReport report = file::SaveCall{request, &producer}.begin(*solo(), save_options.timeout)->write();
  save_options.progress = {};  // its line goes away
  note_written(options.output.path);
  if (options.output.json) {
    put_json(Json::object({{"tensors", views.size()}, {"bytes", report.bytes_written}, {"files", report.files}}));
  } else {
    print_written(options.output, views.size(), report);
  }
  return 0;
}

}  // namespace

void add_convert(CLI::App& app, Action& chosen) {
  std::shared_ptr<ConvertOptions> options;
  CLI::App& verb = add_verb(app, chosen, "convert",
                            "Write the same tensors anew: in another dtype, in one file or many, under other names",
                            convert, options);
  verb.add_option("IN", options->input, "file or directory")->required();
  add_output(verb, options->output);
  verb.add_option(
          "--rename", options->renames,
          "new names, several times: a name, or a pattern with one * on each side; the first rule that fits is applied")
      ->take_all()
      ->expected(1)
      ->option_text("FROM=TO");
  add_threads(verb, options->threads);
  add_examples(verb, {{"For inference, in files of 5 GB",
                       "shardow convert run/ema.safetensors -o model --dtype bfloat16 --max-shard-size 5GB"},
                      {"Without a wrapper's prefix",
                       "shardow convert wrapped.safetensors -o plain.safetensors --rename 'module.*=*'"},
                      {"A directory as one file", "shardow convert model -o model.safetensors"}});
}

}  // namespace shardow::cli

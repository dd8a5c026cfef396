// The same tensors in other files: another dtype, another number of files, other names. Bytes go from file to file,
// chunk by chunk.
#include <algorithm>
#include <atomic>

#include "base/errors.h"
#include "cli/exit_status.h"
#include "cli/lanes.h"
#include "cli/output.h"
#include "cli/renames.h"
#include "cli/sources.h"
#include "file/call.h"
#include "file/load.h"
#include "file/model_texts.h"

namespace shardow::cli {
namespace {

constexpr int kMostWriters = 8;  // threads: some 6 MiB each, and disks give no more to more of them

struct ConvertOptions {
  std::string input;
  std::vector<std::string> renames;
  OutputOptions output;
  int threads = 0;
};

/// Returns the index of a tensor among those of its checkpoint.
size_t place_of(const file::Catalog& catalog, const file::Stored& stored) {
  return static_cast<size_t>(&stored - &*catalog.tensors.begin());
}

/// `crcs`: of all that was read, by tensor.
void check_bytes(const file::Catalog& catalog, const std::vector<uint64_t>& crcs) {
  for (const file::Stored& stored : catalog.tensors) {
    if (const uint64_t crc = crcs[place_of(catalog, stored)]; stored.crc && crc != *stored.crc)
      base::fail(Code::kCorrupt, "{}: '{}': its bytes have the CRC-32 {:08x}, the header says {:08x}",
                 catalog.files[stored.file].file->path().string(), stored.entry.name, crc, *stored.crc);
  }
}

int convert(const ConvertOptions& options) {
  const Checkpoint checkpoint = open_one(options.input);
  const std::map<std::string, std::string> old_names = Renames(options.renames).apply(checkpoint.names());
  std::vector<TensorView> views;
  for (const auto& [name, old_name] : old_names) {
    const StoredTensor tensor = checkpoint.tensor(old_name);
    views.push_back({name, tensor.dtype, Region::whole(tensor.shape), nullptr});
  }
  const file::Catalog& catalog = file::Inside::of(checkpoint);
  std::vector<uint64_t> crcs(catalog.tensors.size(), 0);  // changed through std::atomic_ref
  SaveOptions save_options;
  save_options.dtype = options.output.file_dtype();
  save_options.max_shard_size = options.output.shard_bytes();
  save_options.metadata = metadata_of(checkpoint);
  save_options.texts = file::model_texts(checkpoint, options.output.path);
  save_options.progress = watched("convert");
  file::Producer producer;
  producer.read = [&](const TensorView& wanted) {
    check_interrupted();
    const file::Stored& stored = catalog.find(old_names.at(wanted.name));
    const uint64_t sum = file::read_summed(catalog, stored, wanted, stored.crc.has_value());
    std::atomic_ref(crcs[place_of(catalog, stored)]).fetch_xor(sum);
  };
  producer.check = [&] { check_bytes(catalog, crcs); };
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

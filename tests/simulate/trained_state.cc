#include "trained_state.h"

#include <fmt/format.h>

#include <bit>

namespace shardow::simulated {
namespace {

AverageOptions options_of(const Job& job, Group* group) {
  AverageOptions options;
  options.schedules = {Schedule::constant(0.5)};
  if (job.schedules > 1) options.schedules.push_back(Schedule::constant(0.75));
  options.num_threads = 1;
  options.overlap = job.overlap;
  options.replicas = job.replicas ? group : nullptr;
  options.timeout = std::chrono::milliseconds(60'000);
  return options;
}

void put(std::byte* to, DType dtype, double value) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::kF64) std::memcpy(to, &value, 8);
  if (dtype == DType::kF32) std::memcpy(to, &single, 4);
  if (dtype != DType::kBF16) return;
  const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(single) >> 16);  // exact: values are small and whole
  std::memcpy(to, &half, 2);
}

std::vector<std::byte> bytes_of(const TensorView& view) {
  const auto* data = static_cast<const std::byte*>(view.data);
  return {data, data + view.region.size() * dtype_bits(view.dtype) / 8};
}

/// Whether it has its part of `whole`.
bool has_part(const TensorView& view, const std::vector<std::byte>& whole) {
  const int64_t size = dtype_bits(view.dtype) / 8;
  const auto* data = static_cast<const std::byte*>(view.data);
  bool same = true;
  view.region.for_each_run([&](const shardow::Run& run) {
    same = same && std::equal(data + run.local_begin * size, data + (run.local_begin + run.length) * size,
                              whole.data() + run.global_begin * size);
  });
  return same;
}

}  // namespace

Model::Model(const Job& job, int rank, int ranks, Group* group) {
  for (const Spec& spec : kTrained)
    held_.emplace_back(spec.name, spec.dtype, kShardings[job.sharding].second(spec.shape, rank, ranks));
  fill();
  average_ = std::make_unique<Average>(weights(), options_of(job, group));
}

void Model::train() {
  average_->finish_reading();
  ++step_;
  fill();
  average_->update();
}

void Model::fill() {
  for (Held& one : held_) {
    const int64_t size = dtype_bits(one.view.dtype) / 8;
    one.view.region.for_each_run([&](const shardow::Run& run) {
      for (int64_t i = 0; i < run.length; ++i) {
        const int64_t at = run.global_begin + i;
        put(one.memory.data() + (run.local_begin + i) * size, one.view.dtype,
            static_cast<double>((at * 31 + step_ * 17 + one.view.name[0]) % 127));
      }
    });
  }
}

Content Model::weights_now() {
  Content content;
  for (const Held& one : held_) content.tensors.push_back(one.memory);
  return content;
}

Content Model::averages_now() {
  Content content{{}, average_->state()};
  for (size_t k = 0; k < average_->size(); ++k) {
    for (const TensorView& view : average_->views(k)) content.tensors.push_back(bytes_of(view));
  }
  return content;
}

std::string Model::differs(const Content& weights, const Content& averages) {
  for (size_t i = 0; i < held_.size(); ++i) {
    if (!has_part(held_[i].view, weights.tensors[i])) return "the weights of " + held_[i].view.name;
  }
  size_t i = 0;
  for (size_t k = 0; k < average_->size(); ++k) {
    for (const TensorView& view : average_->views(k)) {
      if (!has_part(view, averages.tensors[i++])) return fmt::format("average {} of {}", k, view.name);
    }
  }
  return average_->state() == averages.state ? "" : "the state of the averages";
}

Content content_of(const fs::path& path, int schedules) {
  std::vector<std::string> names;
  std::vector<Checkpoint> files;
  if (schedules > 1) {
    for (const std::string& key : decay_keys(std::vector{Schedule::constant(0.5), Schedule::constant(0.75)}))
      names.push_back(ema_file_name(key));
    files = Checkpoint::open_files(path, names);
  } else {
    files = {Checkpoint::open(path)};
  }
  Content content;
  for (const Checkpoint& file : files) {
    for (const Spec& spec : kTrained) {
      Held one(spec.name, file.tensor(spec.name).dtype, Region::whole(spec.shape));
      file.read(one.view);
      content.tensors.push_back(std::move(one.memory));
    }
    const auto found = file.metadata().find(kStateKey);
    if (found != file.metadata().end()) content.state = found->second;
  }
  return content;
}

}  // namespace shardow::simulated

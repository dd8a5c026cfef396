#include "shardow/average.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "average/chunk_table.h"
#include "average/impl.h"
#include "callbacks.h"
#include "core.h"
#include "kernels/cuda.h"
#include "kernels/noise.h"
#include "shardow/error.h"
#include "store.h"
#include "tensor/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shardow::python {
namespace {

using average::Inside;

/// Lets other Python threads run during a call, which may wait for an update in the background.
using Released = nb::call_guard<nb::gil_scoped_release>;

/// Calls the Updater of python/shardow/averaging/torch_rules.py.
class PythonBackend final : public average::Backend {
 public:
  explicit PythonBackend(nb::object updater) : updater_(std::move(updater)) {}
  ~PythonBackend() override {
    const nb::gil_scoped_acquire gil;
    updater_.reset();
  }

  average::NonFiniteCount update(const kernels::Step& step, bool /*by_runs*/) override {
    const nb::gil_scoped_acquire gil;
    nb::list averages;
    for (int k = 0; k < step.num_averages; ++k) {
      const auto& [form, decay, weight] = step.averages[static_cast<size_t>(k)];
      averages.append(nb::make_tuple(static_cast<int>(form), decay, weight));
    }
    try {
      updater_.attr("update")(averages, step.hold, step.seed, step.step);
    } catch (const nb::python_error& error) {
      throw Error(Code::kInternal, without_stack(error));
    }
    return {};
  }
  void copy_parameters() override {
    const nb::gil_scoped_acquire gil;
    updater_.attr("copy")();
  }
  average::NonFiniteCount read_count() override {
    const nb::gil_scoped_acquire gil;
    const auto [elements, first] = nb::cast<std::pair<int64_t, std::string>>(updater_.attr("read_count")());
    return {elements, average::hash_name(first)};
  }
  int64_t table_bytes() const noexcept override { return 0; }

 private:
  nb::object updater_;
};

class PythonMemory final : public average::OtherMemory {
 public:
  explicit PythonMemory(nb::object memory) : memory_(std::move(memory)) {}
  ~PythonMemory() override {
    const nb::gil_scoped_acquire gil;
    memory_.reset();
  }

  std::unique_ptr<average::Backend> bind(std::span<const TensorView> parameters) override {
    const nb::gil_scoped_acquire gil;
    nb::list names;
    for (const TensorView& parameter : parameters) names.append(parameter.name);
    return std::make_unique<PythonBackend>(memory_.attr("bind")(names));
  }
  void keep(const TensorView& weights) override { call("keep", weights.name); }
  void show(const TensorView& weights, size_t k) override { call("show", weights.name, k); }
  void put_back(const TensorView& weights) override { call("put_back", weights.name); }
  void forget() override { call("forget"); }

 private:
  template <class... Arguments>
  void call(const char* name, const Arguments&... arguments) {
    const nb::gil_scoped_acquire gil;
    memory_.attr(name)(arguments...);
  }

  nb::object memory_;
};

/// Calls Python for a swap. An error that is no Exception (KeyboardInterrupt) stays on its rank.
template <class Fn>
auto in_swap(Fn fn) {
  const nb::gil_scoped_acquire gil;
  try {
    return fn();
  } catch (nb::python_error& raised) {
    throw_if_ours(raised);
    if (!raised.matches(PyExc_Exception)) interrupt(std::move(raised));
    throw Raised(std::move(raised));
  }
}

/// Calls the Swap of python/shardow/averaging/swap.py, which is borrowed.
class PythonWeights final : public average::WeightsMemory {
 public:
  explicit PythonWeights(nb::handle swap) : swap_(swap) {}

  std::vector<TensorView> places(bool strict) override {
    return in_swap([&] { return nb::cast<std::vector<TensorView>>(swap_.attr("places")(strict)); });
  }
  void exchange(const std::function<void()>& writes, Deadline deadline) override {
    in_swap([&] { swap_.attr("exchange")(writes, seconds_left(deadline)); });
  }
  void scatter() override {
    in_swap([&] { swap_.attr("scatter")(); });
  }
  void written() override {
    in_swap([&] { swap_.attr("written")(); });
  }

 private:
  nb::handle swap_;
};

nb::dict stats_dict(const Average& average) {
  AverageStats stats;
  {
    const nb::gil_scoped_release release;
    stats = average.stats();
  }
  nb::dict dict;
  dict["step"] = stats.step;
  dict["updates"] = stats.updates;
  dict["parameters"] = stats.parameters;
  dict["elements"] = stats.elements;
  dict["bytes"] = stats.bytes;
  dict["bytes_moved"] = stats.bytes_moved;
  dict["seconds"] = stats.seconds;
  dict["held_nonfinite"] = stats.held_non_finite;
  dict["table_bytes"] = stats.table_bytes;
  dict["offload_bytes"] = stats.offload_bytes;
  dict["hidden_seconds"] = stats.hidden_seconds;
  dict["waited_seconds"] = stats.waited_seconds;
  return dict;
}

void bind_enums(nb::module_& m) {
  nb::enum_<Rule>(m, "Rule")
      .value("lerp", Rule::kLerp)
      .value("mul_add", Rule::kMulAdd)
      .value("two_products", Rule::kTwoProducts)
      .value("difference", Rule::kDifference)
      .value("fused_difference", Rule::kFusedDifference)
      .value("quotient", Rule::kQuotient);
  nb::enum_<Rounding>(m, "Rounding")
      .value("auto", Rounding::kAuto)
      .value("nearest", Rounding::kNearest)
      .value("stochastic", Rounding::kStochastic);
  nb::enum_<OptionsFrom>(m, "OptionsFrom").value("file", OptionsFrom::kFile).value("own", OptionsFrom::kOwn);
  nb::enum_<NonFinite>(m, "NonFinite")
      .value("hold", NonFinite::kHold)
      .value("propagate", NonFinite::kPropagate)
      .value("raise_", NonFinite::kRaise);
}

}  // namespace

void bind_average(nb::module_& m) {
  bind_enums(m);
  nb::class_<TensorView>(m, "TensorView", "Describes memory that it does not own.")
      .def(
          "__init__",
          [](TensorView* self, std::string name, const std::string& dtype, const Region& region, uintptr_t data,
             const std::string& device, int index, uintptr_t stream) {
            const Device::Kind kind = device == "cuda"    ? Device::Kind::kCuda
                                      : device == "other" ? average::kOther
                                                          : Device::Kind::kCpu;
            new (self) TensorView{std::move(name),
                                  dtype_from_name(dtype),
                                  region,
                                  reinterpret_cast<void*>(data),
                                  {kind, index, reinterpret_cast<void*>(stream)}};
          },
          "name"_a, "dtype"_a, "region"_a, "data"_a, "device"_a = "cpu", "index"_a = 0, "stream"_a = 0)
      .def_ro("name", &TensorView::name)
      .def_ro("region", &TensorView::region)
      .def_prop_ro("data", [](const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data); });
  nb::class_<AverageOptions>(m, "AverageOptions", "Options of an Average; see include/shardow/average.h.")
      .def(
          "__init__",
          [](AverageOptions* self, std::vector<Schedule> schedules, const std::string& dtype, Rule rule,
             Rounding rounding, NonFinite non_finite, int64_t update_every, int64_t start_step, uint64_t seed,
             int num_threads, bool overlap, bool keep_values, int64_t ring_bytes) {
            new (self) AverageOptions{.schedules = std::move(schedules),
                                      .dtype = dtype_from_name(dtype),
                                      .rule = rule,
                                      .rounding = rounding,
                                      .non_finite = non_finite,
                                      .update_every = update_every,
                                      .start_step = start_step,
                                      .seed = seed,
                                      .keep_values = keep_values,
                                      .num_threads = num_threads,
                                      .overlap = overlap,
                                      .ring_bytes = ring_bytes};
          },
          nb::kw_only(), "schedules"_a, "dtype"_a, "rule"_a, "rounding"_a, "non_finite"_a, "update_every"_a,
          "start_step"_a, "seed"_a, "num_threads"_a, "overlap"_a = false, "keep_values"_a = false,
          "ring_bytes"_a = AverageOptions{}.ring_bytes);
  nb::class_<average::SwapRanks>(m, "SwapRanks", "Ranks that swap; `divided`: replicas own parts of others' weights.")
      .def(nb::new_([](Group& group, bool divided, double timeout, std::string whose) {
             return average::SwapRanks{&group, divided, milliseconds(timeout), std::move(whose)};
           }),
           "group"_a, "divided"_a, "timeout"_a, "whose"_a, nb::keep_alive<0, 1>());
  nb::class_<average::SwapRecord>(m, "PreparedSwap", "A swap that has all its memory, and has changed nothing.");
  nb::class_<Average>(m, "Average",
                      "Exponential moving averages of the parameters that this rank holds, in the caller's memory.")
      .def(
          "__init__",
          [](Average* self, std::vector<TensorView> parameters, std::vector<std::vector<TensorView>> averages,
             const AverageOptions& options, nb::object other) {
            std::shared_ptr<average::OtherMemory> memory;
            if (!other.is_none()) memory = std::make_shared<PythonMemory>(std::move(other));
            new (self) Average(Inside::make(std::move(parameters), std::move(averages), options, std::move(memory)));
            Inside::of(*self).swap.abandon();  // Python gives memory back in any order
          },
          "parameters"_a, "averages"_a, "options"_a, "other"_a = nb::none(),
          "`other`: does the work on views of the device \"other\".")
      .def(
          "bind",
          [](Average& self, const std::vector<TensorView>& parameters) {
            self.wait();
            self.bind(parameters);
          },
          "parameters"_a, Released())
      .def(
          "update",
          [](Average& self, std::optional<int64_t> step, double samples) {
            const UpdateReport report = self.update(step, samples);
            return std::pair(report.applied, report.non_finite);
          },
          "step"_a = nb::none(), "samples"_a = 0.0, Released(),
          "Returns (applied, elements held because their parameter was not finite).")
      .def(
          "update_by",
          [](Average& self, const std::vector<std::pair<double, double>>& pairs, std::optional<int64_t> step) {
            std::vector<Factors> factors;
            for (const auto& [decay, weight] : pairs) factors.push_back({decay, weight});
            return self.update_by(factors, step).non_finite;
          },
          "factors"_a, "step"_a = nb::none(), Released(),
          "Takes (decay, weight) of each average; returns the elements held because their parameter was not finite.")
      .def("set_decay", &Average::set_decay, "decay"_a, "Sets the decay of settable(), from the next update on.")
      .def(
          "prepare_replay",
          [](Average& self, std::optional<int64_t> step, double samples) {
            return self.prepare_replay(step, samples).applied;
          },
          "step"_a = nb::none(), "samples"_a = 0.0, Released(),
          "Counts the step of the next replay of a CUDA graph that captured update(), and gives the graph its numbers.")
      .def(
          "set_stream",
          [](Average& self, int index, uintptr_t stream) { self.set_stream(index, reinterpret_cast<void*>(stream)); },
          "index"_a, "stream"_a,
          "Moves later work on a CUDA device to this stream, after all work under way on the last one.")
      .def("wait", &Average::wait, Released(),
           "Waits until the update in the background, if any, has ended; raises its error.")
      .def("finish_reading", &Average::finish_reading, Released(),
           "Waits until the parameters may change: CUDA devices wait for the copies of the update under way, the host "
           "until all have begun; without such copies it is wait().")
      .def("reset", &Average::reset, Released(), "Copies the bound parameters into every average.")
      .def(
          "prepare_swap",
          [](Average& self, size_t k, const std::vector<TensorView>& weights) {
            auto& inside = Inside::of(self);
            return inside.swap.prepare(weights.empty() ? inside.storage.whole() : std::span(weights), k);
          },
          "k"_a, "weights"_a = std::vector<TensorView>(), Released(),
          "Makes step 1 of src/average/swap.cc on this rank, for the k-th averages and weights (default: the bound).")
      .def(
          "swap_in",
          [](Average& self, average::SwapRecord& prepared, nb::handle memory, const average::SwapRanks& ranks) {
            PythonWeights weights(memory);
            Inside::of(self).swap.enter(std::move(prepared), weights, ranks);
          },
          "prepared"_a, "memory"_a, "ranks"_a, Released(),
          "Makes its steps 2 to 4. Where it raises, swap_out() comes next. Collective.")
      .def(
          "swap_out",
          [](Average& self, nb::handle memory, const average::SwapRanks& ranks, std::string call, std::string error,
             bool enters, bool restores, bool strict) {
            PythonWeights weights(memory);
            Inside::of(self).swap.leave({std::move(call), std::move(error), enters, restores, strict}, weights, ranks);
          },
          "memory"_a, "ranks"_a, "call"_a, "error"_a = "", "enters"_a = false, "restores"_a = false, "strict"_a = true,
          Released(),
          "Makes its steps 5 to 8, from whatever point the swap has reached. `error`: what ended the block, or "
          "swap_in() with `enters`. Collective.")
      .def_prop_ro(
          "why_swapped",
          [](const Average& self) {
            const auto& swap = Inside::of(self).swap.record();
            return to_text(swap ? swap->why : std::string());
          },
          "Why the averages are still in the weights' memory though swap_out() was called; else empty.")
      .def_prop_ro("swapped", &Average::swapped)
      .def("stats", &stats_dict)
      .def(
          "non_finite",
          [](const Average& self) -> std::optional<std::tuple<int64_t, int64_t, std::string>> {
            const auto met = self.non_finite();
            if (!met) return std::nullopt;
            return std::tuple(met->step, met->elements, met->tensor);
          },
          Released(),
          "(step, elements on this rank, name of the first tensor) of the first update that held NaN or Inf and was "
          "not forgotten yet, or "
          "None.")
      .def("forget_non_finite", &Average::forget_non_finite)
      .def("state", &Average::state, Released(), "Counters, schedules and seed as JSON.")
      .def("set_state", &Average::set_state, "json"_a, "options"_a = OptionsFrom::kFile, Released(),
           "Counters of a saved state, and with OptionsFrom.file its options; nothing has changed where it raises.")
      .def_prop_ro(
          "schedules",
          [](const Average& self) { return std::vector(self.schedules().begin(), self.schedules().end()); },
          "The schedules in force, one for each average.")
      .def_prop_ro("decays", &Average::decays, Released(),
                   "The decays of the next step, one for each average; NaN where its schedule has none.")
      .def_prop_ro(
          "progress",
          [](const Average& self) {
            const auto look = Inside::of(self).look();
            const average::Counters& counters = Inside::of(self).clock.counters;
            return std::tuple(counters.step, counters.updates, counters.applied_step, counters.applied_samples);
          },
          Released(),
          "(steps counted, updates applied, the step of the last that changed the averages, samples by then), without "
          "waiting.")
      .def(
          "samples_by",
          [](const Average& self, double batch) { return Inside::of(self).clock.counters.samples_by(batch); },
          "batch"_a,
          "Training samples seen at the next step, where each one since the last update had `batch` of them.")
      .def(
          "restart", [](Average& self) { Inside::of(self).restart(); }, Released(),
          "reset(), at step 0, with nothing counted.");
  m.def("cuda_available", &kernels::cuda::available, "True if a CUDA device answers.");
  m.def(
      "cuda_compiler",
      [] {
        const auto [compiler, device, seconds] = kernels::cuda::compile_report();
        return std::tuple(compiler, device, seconds);
      },
      "(\"NVRTC 12.9\", the device's name, seconds) of the CUDA kernels compiled in this process; empty: none.");
  m.def(
      "cuda_refusal",
      [](int index) {
        try {
          kernels::cuda::check_kernels(index);
          return std::string();
        } catch (const Error& error) {
          return std::string(error.what());
        }
      },
      "index"_a, "Why a CUDA device doesn't run the engine's kernels; empty: it does.");
  m.def(
      "noise_key",
      [](uint64_t seed, int64_t step, std::string_view tensor, int average) {
        const kernels::NoiseKey key = kernels::noise_key(seed, step, average::hash_name(tensor), average, 0);
        return std::pair(key.start, key.mix);
      },
      "seed"_a, "step"_a, "tensor"_a, "average"_a, "(start, mix) of src/kernels/noise.h, below 2^32 elements.");
  m.def("arena_stride", &average::arena_stride, "bytes"_a, "num_averages"_a,
        "Bytes from one average's memory to the next one's, on a CPU.");
}

}  // namespace shardow::python

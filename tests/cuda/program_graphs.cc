// Graphs that a random program captures and replays, of weights that have moved and of an Average that is gone too.
#include <exception>

#include "graph_calls.h"
#include "program.h"
#include "world.h"

namespace shardow::testing {

using kernels::testing::Current;
using kernels::testing::graph_calls;

/// The streams of the weights, by device.
std::map<int, void*> Program::streams() const {
  std::map<int, void*> streams;
  for (const TensorView& view : weights_.tested) {
    if (on_device(view)) streams[view.device.index] = view.device.stream;
  }
  return streams;
}

bool Program::can_capture() const {
  const auto all = streams();
  return !all.empty() && !fake::broken() && options_.non_finite != NonFinite::kRaise && missing_ == Missing::kNothing &&
         std::none_of(all.begin(), all.end(), [](const auto& entry) { return entry.second == nullptr; });
}

/// Captures what fn() does, after all that was before, as torch does. False where a capture was lost.
bool Program::record(const std::function<void()>& fn, std::vector<Replay>* graphs) {
  fake::synchronize();
  const int mode = static_cast<int>(random_() % 3);
  const auto all = streams();
  for (const auto& [device, stream] : all) {
    const Current current(device);
    graph_calls().begin_capture(stream, mode);
  }
  fn();
  bool kept = true;
  for (const auto& [device, stream] : all) {
    const Current current(device);
    void *graph = nullptr, *replay = nullptr;
    kept = graph_calls().end_capture.status(stream, &graph) == 0 && kept;
    if (graph == nullptr) continue;
    graph_calls().instantiate(&replay, graph, 0);
    graph_calls().destroy(graph);
    graphs->push_back({device, replay});
  }
  return kept;
}

void Program::capture() {
  if (!can_capture()) return update();
  disarm();
  destroy(graphs_);
  leaves_memory_ = true;  // what graphs read
  bool applied = false;
  std::string refused;
  const bool kept = record(
      [&] {
        refused = error_of([&] { applied = tested_->update().applied; });
        static_cast<void>(error_of([&] { tested_->finish_reading(); }));
      },
      &graphs_);
  if (fake::broken()) throw Broken();
  if (!kept || applied) differs("a capture that was lost, or an update in it that was counted");
  if (refused.empty()) return;
  note(Error(Code::kUnsupported, refused));
  destroy(graphs_);
  const bool offloads = has(Place::kOffloaded);
  if (!offloads) differs("a capture was refused: " + refused);
  const std::string replay = error_of([&] { tested_->prepare_replay(); });
  if (replay.find("call update() after each replay") == replay.npos) differs("a replay was not refused: " + replay);
}

/// One step by the graphs where they are of the weights as they are; else they do nothing.
void Program::replay() {
  const int64_t step = oracle_->stats().step;
  std::string refused;
  call([&] {
    if (tested_->stats().step > step) return;
    try {
      tested_->prepare_replay();
    } catch (const Error& error) {
      if (error.code() != Code::kInvalidArgument) throw;
      note(error);
      refused = error.what();
    }
  });
  const std::string expected = graphs_.empty() ? "capture update() anew" : "the captured graph has no launch for that";
  if (refused.empty() && graphs_.empty()) return differs("a replay of weights that have moved");
  launch(refused.empty() ? graphs_ : stale_);
  if (!refused.empty()) {
    if (refused.find(expected) == refused.npos) differs("a replay was refused: " + refused);
    return capture();
  }
  before_ = averages_of_oracle();
  oracle_->update(std::max(step + 1, oracle_->stats().step + 1));
}

void Program::launch(const std::vector<Replay>& graphs) {
  const auto all = streams();
  for (const auto& [device, graph] : graphs) {
    const Current current(device);
    const int status = graph_calls().launch.status(graph, all.at(device));
    if (fake::broken()) throw Broken();
    if (status != 0) differs("a replay: error " + std::to_string(status));
  }
}

void Program::destroy(std::vector<Replay>& graphs) {
  for (const auto& [device, graph] : graphs) graph_calls().destroy_replay(graph);
  graphs.clear();
}

/// The Average goes, in a capture now and then. Graphs that were captured of it do nothing any more.
void Program::end() {
  disarm();
  const auto expected = averages_of_oracle();
  std::vector<Replay> empty;
  if (can_capture() && one_in(2)) {
    call([&] { tested_->wait(); });
    if (!record([&] { tested_.reset(); }, &empty)) differs("a capture that was lost by the Average's end");
  }
  tested_.reset();
  launch(graphs_);
  launch(stale_);
  launch(empty);
  destroy(empty);
  if (!averages_are(expected)) differs("averages after the end");
}

}  // namespace shardow::testing

// Mistakes of programs that no single argument shows: memory that is shared, threads that meet, replicas that disagree,
// a swap that is never ended. The tests run under the sanitizers too.
#include <atomic>
#include <functional>
#include <latch>
#include <thread>

#include "average/average_fixture.h"
#include "average/impl.h"
#include "base/worker.h"
#include "shardow/average.h"

namespace shardow {
namespace {

TensorView stretch(std::string name, float* data, int64_t size) {
  return {std::move(name), DType::kF32, Region::whole({size}), data};
}

TEST(Mistakes, ViewsThatShareMemoryAreNamedBothAndNothingChanges) {
  std::vector<float> memory(100, 1.0f), other(100, 2.0f), more(100, 3.0f);
  const auto a = stretch("a", memory.data(), 40), next = stretch("next", memory.data() + 40, 10),
             b = stretch("b", memory.data() + 39, 20), empty = stretch("empty", memory.data() + 3, 0);
  const auto two = [](const TensorView& x, const TensorView& y) { return std::vector{x, y}; };
  const auto says = [](const std::string& message, const char* what) {
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  EXPECT_NO_THROW(Average(std::vector{a, next, empty}));
  says(message_of([&] { Average{two(a, b)}; }, Code::kInvalidArgument), "'a' and 'b' share memory: 4 bytes");
  says(message_of([&] { Average{two(b, a)}; }, Code::kInvalidArgument), "'a' and 'b' share memory");

  const auto averages_at = [&](float* of_a, float* of_next) {
    return std::vector<std::vector<TensorView>>{two(stretch("a", of_a, 40), stretch("next", of_next, 10))};
  };
  const auto made = [&](float* of_a, float* of_next) {
    Average(two(a, next), averages_at(of_a, of_next), with_decay(0.5));
  };
  EXPECT_NO_THROW(made(other.data(), other.data() + 40));
  other.assign(100, 2.0f);
  says(message_of([&] { made(other.data(), other.data() + 20); }, Code::kInvalidArgument),
       "average 0 of 'a' and average 0 of 'next'");
  says(message_of([&] { made(memory.data() + 45, other.data()); }, Code::kInvalidArgument),
       "'next' and average 0 of 'a' share memory");

  Average ema(two(a, next), averages_at(other.data(), other.data() + 40), with_decay(0.5));
  const std::vector<float> before = other;
  says(message_of([&] { ema.bind(two(a, stretch("next", memory.data() + 30, 10))); }, Code::kInvalidArgument),
       "'a' and 'next' share");
  says(message_of([&] { ema.update(two(stretch("a", other.data(), 40), next)); }, Code::kInvalidArgument),
       "share memory");
  says(message_of([&] { ema.swap_in(two(stretch("a", more.data(), 40), stretch("next", more.data() + 39, 10))); },
                  Code::kInvalidArgument),
       "'a' and 'next' share");
  EXPECT_EQ(other, before);
  EXPECT_FALSE(ema.swapped());
}

TEST(Mistakes, ASwapThatIsOpenAtTheEndIsTakenBack) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {  // exchanged in place, kept aside
    OwnTensor p("p", columns(), 1);
    const std::vector<float> first = p.values;
    AverageOptions options = with_decay(0.5);
    options.dtype = dtype;
    {
      Average ema(std::vector{p.view}, options);
      p.fill(2);
      ema.update();
      p.fill(3);
      ema.swap_in();
    }
    std::vector<float> expected = p.values;
    p.fill(3);
    EXPECT_EQ(expected, p.values);
    EXPECT_NE(expected, first);

    Average ema(std::vector{p.view}, options), other(std::vector{p.view}, options);
    ema.swap_in();
    ema = std::move(other);  // the one that is overwritten ends
    EXPECT_EQ(expected, p.values);
  }
}

TEST(Mistakes, ASwapThatIsAbandonedLeavesTheWeightsMemoryAlone) {
  auto p = std::make_unique<OwnTensor>("p", columns(), 1);
  Average ema(std::vector{p->view}, with_decay(0.5));
  ema.swap_in();
  average::Inside::of(ema).swap.abandon();
  p.reset();  // the sanitizer would see it touched
}

std::atomic<bool> held = false;

TEST(Mistakes, TwoThreadsAtOnceAreToldSoWhicheverCallTheyMake) {
  OwnTensor p("layer.weight", columns(), 1), q("layer.bias", {3}, 1);
  const std::vector views{p.view, q.view};
  AverageOptions options = with_decay(0.5);
  options.overlap = true;
  Average ema(views, options);
  held = true;
  base::worker_seam = [] { held.wait(true); };
  ema.update();
  std::latch begun(1);
  std::jthread waiting([&] {
    begun.count_down();
    for (bool waited = false; !waited;) {
      try {
        ema.wait();  // returns when the update may go on
        waited = true;
      } catch (const Error&) {  // it met the other thread's call
      }
    }
  });
  begun.wait();
  const std::function<void()> calls[] = {
      [&] { ema.update(); },
      [&] { ema.update(views); },
      [&] { ema.bind(views); },
      [&] { ema.wait(); },
      [&] { ema.swap_in(); },
      [&] { ema.swap_out(); },
      [&] { ema.reset(); },
      [&] { ema.state(); },
      [&] { ema.views(); },
      [&] { ema.finish_reading(); },
      [&] { ema.set_state("{}"); },
      [&] { average::Inside::of(ema).swap.prepare(views, 0); },
      [&] { average::Inside::of(ema).restart(); },
      [&] { ema.non_finite(); },
  };
  // The other thread may not have come to its call yet. A bind() of the bound views shows when, and changes nothing.
  for (bool met = false; !met;) {
    std::this_thread::yield();
    try {
      ema.bind(views);
    } catch (const Error&) {
      met = true;
    }
  }
  for (const auto& call : calls) {
    const std::string message = message_of(call, Code::kInvalidArgument);
    EXPECT_NE(message.find("of the averages of 'layer.weight' and 1 more while another thread is in a call"),
              std::string::npos)
        << message;
  }
  held = false;
  held.notify_all();
  waiting.join();
  base::worker_seam = nullptr;
  EXPECT_EQ(ema.stats().updates, 1);
}

TEST(Mistakes, ThreadsThatTakeTurnsAreFine) {
  OwnTensor p("p", columns(), 1);
  Average ema(std::vector{p.view}, with_decay(0.5));
  for (int i = 0; i < 3; ++i) std::jthread([&] { ema.update(); }).join();
  EXPECT_EQ(ema.stats().updates, 3);
}

/// Returns each replica's error where `call` makes two replicas differ, or where rank 1 has its views `turned`.
std::vector<std::string> errors_of_replicas(const std::function<void(Group&, Average&)>& call, bool turned = false) {
  auto groups = threads(2);
  std::vector<std::string> messages(2);
  std::vector<std::jthread> ranks;
  for (auto& group : groups) {
    ranks.emplace_back([&] {
      const bool other = turned && group->rank() == 1;
      OwnTensor p("p", {kRows}, 1), q("q", {kColumns}, 1);
      AverageOptions options{.schedules = {Schedule::constant(0.5), Schedule::constant(0.25)}};
      options.replicas = group.get();
      Average ema(other ? std::vector{q.view, p.view} : std::vector{p.view, q.view}, options);
      const std::vector<float> before = p.values;
      try {
        call(*group, ema);
      } catch (const Error& error) {
        messages[static_cast<size_t>(group->rank())] = error.what();
      }
      EXPECT_FALSE(ema.swapped());
      EXPECT_EQ(p.values, before);
    });
  }
  return ranks.clear(), messages;
}

TEST(Mistakes, ReplicasThatDisagreeAreToldSoBeforeAnythingIsExchanged) {
  const auto all_say = [](const std::vector<std::string>& messages, const char* what) {
    for (const std::string& message : messages)
      EXPECT_NE(message.find(what), std::string::npos) << what << ": " << message;
  };
  all_say(errors_of_replicas([](Group& group, Average& ema) { ema.swap_in(static_cast<size_t>(group.rank())); }),
          "the average that is swapped in is 0 on rank 0 and 1 on rank 1");
  all_say(errors_of_replicas([](Group& group, Average& ema) {
            if (group.rank() == 1) ema.update();
            ema.swap_in();
          }),
          "the number of updates of the averages is 0 on rank 0 and 1 on rank 1; call update() on every rank");
  all_say(errors_of_replicas([](Group&, Average& ema) { ema.swap_in(); }, true),
          "view 0 is 'p', F32 of [37] on rank 0 and 'q', F32 of [11] on rank 1; give all of AverageOptions.replicas "
          "the same");
  all_say(errors_of_replicas([](Group& group, Average& ema) { ema.swap_in(group.rank() == 1 ? 7 : 0); }),
          "swap_in(7): there are 2 averages");
  all_say(errors_of_replicas([](Group&, Average& ema) {
            ema.swap_in(1);
            ema.swap_out();
          }),
          "");
}

}  // namespace
}  // namespace shardow

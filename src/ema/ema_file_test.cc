#include "shardow/ema_file.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/folder_fixture.h"
#include "ema/names.h"
#include "shardow/average.h"
#include "shardow/checkpoint.h"
#include "shardow/error.h"

namespace shardow {
namespace {

using Keys = std::vector<std::string>;

const std::vector<Schedule> kSchedules = {Schedule::constant(0.9999), Schedule::power(0.1), Schedule::constant(0.5)};

std::string state_of(std::vector<Schedule> schedules) {
  float weight = 1;
  const TensorView view{"w", DType::kF32, Region::whole({1}), &weight};
  AverageOptions options;
  options.schedules = std::move(schedules);
  return Average(std::span(&view, 1), options).state();
}

TEST(EmaFile, KeysAreThoseOfTheSchedulesInTheirOrder) {
  const Keys expected = {"0.9999", "power(sigma_rel=0.1)", "0.5"};
  EXPECT_EQ(decay_keys(kSchedules), expected);
  EXPECT_EQ(decay_keys_in({{"format", "pt"}, {kStateKey, state_of(kSchedules)}}), expected);
}

TEST(EmaFile, EqualSchedulesAreRefusedByName) {
  const std::vector<Schedule> schedules = {Schedule::constant(0.5), Schedule::mean(), Schedule::constant(0.5)};
  try {
    decay_keys(schedules);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_STREQ(error.what(), "decay 0.5 is given twice; each average needs a decay of its own");
  }
}

TEST(EmaFile, WhatIsNoSavedEmaHasNoKeys) {
  EXPECT_EQ(decay_keys_in({{"format", "pt"}}), Keys());
  for (const char* state :
       {"", "1", "[]", "{}", R"({"schedules":1})", R"({"schedules":[]})", R"({"schedules":[1]})",
        R"({"schedules":[{"kind":"none"}]})", R"({"schedules":[{"kind":"constant","decay":2}]})", "\xff"})
    EXPECT_EQ(decay_keys_in({{kStateKey, state}}), Keys()) << state;
}

TEST(EmaFile, NamesKeepWhatEveryFileSystemTakes) {
  EXPECT_EQ(ema_file_name("0.9999"), "ema-0.9999.safetensors");
  EXPECT_EQ(ema_file_name("power(sigma_rel=0.1)"), "ema-power-sigma_rel=0.1.safetensors");
  EXPECT_EQ(ema_file_name("linear(from=0.5,to=1e-05,steps=7)"), "ema-linear-from=0.5-to=1e-05-steps=7.safetensors");
  EXPECT_EQ(ema_file_name("/../x--y(("), "ema-..-x--y.safetensors");
  EXPECT_EQ(ema_file_name("a((b--\xc3\xa9(c"), "ema-a-b---c.safetensors");
  EXPECT_EQ(ema_file_name("((("), "ema-.safetensors");
}

class EmaFiles : public InFolder {
 protected:
  /// As EMA.save() does.
  void save_ema(const std::vector<Schedule>& schedules) {
    float weight = 1;
    std::vector<SaveFile> files;
    for (const std::string& key : decay_keys(schedules))
      files.push_back(
          {ema_file_name(key), {{"w", DType::kF32, Region::whole({1}), &weight}}, {{kStateKey, state_of(schedules)}}});
    save(*solo(), files, folder_);
  }

  void save_model() {
    float weight = 2;
    const TensorView view{"w", DType::kF32, Region::whole({1}), &weight};
    save(*solo(), std::span(&view, 1), folder_);
  }

  /// "key: name" of each.
  Keys found(bool beside_a_model = true) const {
    Keys all;
    for (const EmaFile& one : ema_files_in(folder_, beside_a_model)) all.push_back(one.key + ": " + one.name);
    return all;
  }

  /// The file becomes newer than all others.
  void touch(const std::string& name) {
    fs::last_write_time(folder_ / name, fs::file_time_type::clock::now() + std::chrono::seconds(++touched_));
  }

  int touched_ = 0;
};

const Keys kFound = {"0.9999: ema-0.9999.safetensors", "power(sigma_rel=0.1): ema-power-sigma_rel=0.1.safetensors",
                     "0.5: ema-0.5.safetensors"};

TEST_F(EmaFiles, AreThoseOfTheSavedSchedulesInTheirOrder) {
  save_ema(kSchedules);
  EXPECT_EQ(found(), kFound);
  EXPECT_EQ(found(false), kFound);
}

TEST_F(EmaFiles, AreOfTheEmaThatWasSavedLast) {
  for (int round = 0; round < 2; ++round) {
    save_ema(kSchedules);
    EXPECT_EQ(found(), kFound);
    save_ema({Schedule::constant(0.7), Schedule::constant(0.5)});
    EXPECT_EQ(found(), (Keys{"0.7: ema-0.7.safetensors", "0.5: ema-0.5.safetensors"}));
  }
}

/// An earlier version wrote no list.
TEST_F(EmaFiles, WithoutAListAreThoseOfTheNewest) {
  const auto save_each = [&](const std::vector<Schedule>& schedules) {
    float weight = 1;
    const TensorView view{"w", DType::kF32, Region::whole({1}), &weight};
    for (const std::string& key : decay_keys(schedules)) {
      const SaveOptions options{.metadata = {{kStateKey, state_of(schedules)}}};
      save(*solo(), std::span(&view, 1), folder_ / ema_file_name(key), options);
    }
  };
  save_each(kSchedules);
  save_each({Schedule::constant(0.7), Schedule::constant(0.5)});
  touch("ema-0.7.safetensors");
  EXPECT_EQ(found(), (Keys{"0.7: ema-0.7.safetensors", "0.5: ema-0.5.safetensors"}));
  touch("ema-0.9999.safetensors");
  EXPECT_EQ(found(), kFound);
}

TEST_F(EmaFiles, BesideAModelAreLookedForWhereTheyAreAskedForAlone) {
  save_ema(kSchedules);
  save_model();
  EXPECT_EQ(found(), kFound);
  EXPECT_EQ(found(false), Keys());
}

TEST_F(EmaFiles, AreNotWhatOnlyHasSuchAName) {
  EXPECT_EQ(found(), Keys());
  save_model();
  fs::rename(folder_ / "model.safetensors", folder_ / "ema-mine.safetensors");
  EXPECT_EQ(found(), Keys());
  save_ema({Schedule::constant(0.7), Schedule::constant(0.6)});
  fs::remove(folder_ / "averages.json");
  fs::rename(folder_ / "ema-0.7.safetensors",
             folder_ / "ema-copy.safetensors");  // of an EMA, but under no name of its own
  save_ema(kSchedules);
  touch("ema-copy.safetensors");
  touch("ema-mine.safetensors");
  fs::create_symlink("nowhere", folder_ / "ema-gone.safetensors");
  EXPECT_EQ(found(), kFound);
  EXPECT_TRUE(ema_files_in(folder_ / "none").empty());
  EXPECT_TRUE(ema_files_in(folder_ / "ema-mine.safetensors").empty());
}

/// Weights, and an EMA of them.
struct Training {
  std::vector<float> weights = {1, 2, 3, 4, 5};
  Average ema;

  Training() : ema(std::vector<TensorView>{view()}, AverageOptions{.schedules = kSchedules}) {}
  Training(const Training&) = delete;

  TensorView view() { return {"w", DType::kF32, Region::whole({5}), weights.data()}; }
  void step(float by) {
    for (float& weight : weights) weight = weight * 0.75f + by;
    ema.update();
  }
  std::vector<float> averages() const {
    std::vector<float> all;
    for (size_t k = 0; k < ema.size(); ++k) {
      const auto* data = static_cast<const float*>(ema.views(k)[0].data);
      all.insert(all.end(), data, data + 5);
    }
    return all;
  }
};

TEST_F(EmaFiles, AreAllThatAnEmaNeedsToGoOn) {
  const std::unique_ptr<Group> alone = solo();
  Group& group = *alone;
  const fs::path path = folder_ / "ema";
  Training first, second;
  for (const float by : {0.5f, -2.0f, 7.25f}) first.step(by);
  {
    shardow::Average& ema = first.ema;
    shardow::save(group, ema, path);
  }
  {
    shardow::Average& ema = second.ema;
    shardow::load(group, ema, path);
  }
  EXPECT_EQ(second.averages(), first.averages());
  second.weights = first.weights;
  for (Training* one : {&first, &second}) one->step(1.5f);
  EXPECT_EQ(second.averages(), first.averages());
  EXPECT_EQ(second.ema.state(), first.ema.state());
  EXPECT_NE(first.averages(), Training().averages());
}

TEST_F(EmaFiles, AreReadOneByOne) {
  const std::unique_ptr<Group> alone = solo();
  const fs::path path = folder_ / "ema";
  Training training;
  training.step(0.5f);
  save(*alone, training.ema, path);
  std::vector<float> weights(5), all;
  for (const auto& [key, name] : shardow::ema_files_in(path)) {
    const shardow::Checkpoint opened = shardow::Checkpoint::open(path / name);
    opened.read({"w", shardow::DType::kF32, shardow::Region::whole({5}), weights.data()});
    all.insert(all.end(), weights.begin(), weights.end());
  }
  EXPECT_EQ(all, training.averages());
}

TEST_F(EmaFiles, ThatAreDamagedAreAnError) {
  save_ema(kSchedules);
  std::ofstream(folder_ / "ema-0.5.safetensors") << "abc";
  touch("ema-0.5.safetensors");
  try {
    found();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCorrupt) << error.what();
  }
}

}  // namespace
}  // namespace shardow

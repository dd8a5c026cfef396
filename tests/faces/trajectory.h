// A training of numbers that every program can make, with its averages:
//
//   trajectory RANKS FIRST LAST FROM TO SCHEDULE...
//
// Steps FIRST + 1 to LAST, after the averages and their state were loaded from FROM ("-": begun at the weights of step
// FIRST); then they are saved to TO. Schedules are JSON. Rank r of N has rows r, r + N, ... of the matrix "rows", its
// own columns of "columns", and all of "whole". tests/faces/test_faces.py does the same in Python.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "shardow/average.h"
#include "shardow/ema_file.h"
#include "shardow/group.h"

namespace shardow::faces {

inline constexpr int64_t kRows = 37, kColumns = 11;

inline float weight(int64_t element, int64_t step, int64_t seed) {
  return static_cast<float>((element * 7 + step * (13 + element % 5) + seed) % 97 - 40) / 16;
}

/// Memory of the elements of a matrix that stand in given rows and columns.
struct Part {
  std::vector<int64_t> elements;
  std::vector<float> values;
  shardow::TensorView view;

  Part(std::string name, const std::vector<Interval>& rows, const std::vector<Interval>& columns)
      : view{std::move(name), DType::kF32, Region::grid({kRows, kColumns}, {rows, columns}), nullptr} {
    for (const auto& [top, bottom] : rows) {
      for (int64_t row = top; row < bottom; ++row) {
        for (const auto& [left, right] : columns) {
          for (int64_t column = left; column < right; ++column) elements.push_back(row * kColumns + column);
        }
      }
    }
    values.resize(elements.size());
    view.data = values.data();
  }
  void set(int64_t step, int64_t seed) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = weight(elements[i], step, seed);
  }
};

struct Arguments {
  int64_t first, last;
  std::string from, to;
  std::vector<shardow::Schedule> schedules;
};

inline void train(shardow::Group& group, const Arguments& given) {
  const int64_t rank = group.rank(), size = group.size();
  std::vector<Interval> every_nth;
  for (int64_t row = rank; row < kRows; row += size) every_nth.push_back({row, row + 1});
  const std::vector<Interval> all_rows = {{0, kRows}}, all_columns = {{0, kColumns}};
  std::vector<Part> parts;
  parts.emplace_back("rows", every_nth, all_columns);
  parts.emplace_back("columns", all_rows,
                     std::vector<Interval>{{kColumns * rank / size, kColumns * (rank + 1) / size}});
  parts.emplace_back("whole", all_rows, all_columns);
  const auto set = [&](int64_t step) {
    for (size_t i = 0; i < parts.size(); ++i) parts[i].set(step, static_cast<int64_t>(i));
  };

  set(given.first);
  std::vector<shardow::TensorView> views;
  for (const Part& part : parts) views.push_back(part.view);
  shardow::Average ema(views, {.schedules = given.schedules});
  if (given.from != "-") shardow::load(group, ema, given.from);
  for (int64_t step = given.first + 1; step <= given.last; ++step) {
    set(step);
    ema.update();
  }
  shardow::save(group, ema, given.to);
}

inline Arguments arguments(int argc, char** argv, int begin) {
  Arguments given{std::atoll(argv[begin]), std::atoll(argv[begin + 1]), argv[begin + 2], argv[begin + 3], {}};
  for (int i = begin + 4; i < argc; ++i) given.schedules.push_back(Schedule::from_json(argv[i]));
  return given;
}

}  // namespace shardow::faces

#include "file/crc.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace shardow::file {
namespace {

uint32_t of(std::string_view text) {
  return crc32(0, std::as_bytes(std::span(text)));
}

TEST(Crc, IsZlibs) {
  EXPECT_EQ(of(""), 0u);
  EXPECT_EQ(of("123456789"), 0xcbf43926u);
  const std::string text(100'003, 'x');
  EXPECT_EQ(of(text),
            ::crc32(0, reinterpret_cast<const unsigned char*>(text.data()), static_cast<unsigned>(text.size())));
}

TEST(Crc, OfPartsInAnyOrderIsThatOfTheWhole) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::string whole(std::uniform_int_distribution<size_t>(0, 100'000)(random), '\0');
    for (char& c : whole) c = static_cast<char>(random());
    std::vector<size_t> cuts = {0, whole.size()};
    for (int i = 0; i < round % 7; ++i) cuts.push_back(std::uniform_int_distribution<size_t>(0, whole.size())(random));
    std::sort(cuts.begin(), cuts.end());
    uint32_t combined = 0;
    for (size_t i = cuts.size() - 1; i > 0; --i) {
      const std::string_view part = std::string_view(whole).substr(cuts[i - 1], cuts[i] - cuts[i - 1]);
      combined ^= crc32_contribution(of(part), static_cast<int64_t>(whole.size() - cuts[i]));
    }
    EXPECT_EQ(combined, of(whole));
  }
}

TEST(Crc, OfRunsOfSeveralRanksIsThatOfTheWhole) {
  std::mt19937 random(2);
  for (int round = 0; round < 20; ++round) {
    std::string whole(50'000 + static_cast<size_t>(round), '\0');
    for (char& c : whole) c = static_cast<char>(random());
    std::vector<CrcSum> ranks(3);
    const size_t run = 64 + static_cast<size_t>(round) * 7;
    uint32_t combined = 0;
    for (size_t at = 0, turn = 0; at < whole.size(); at += run, ++turn) {
      const std::string_view part = std::string_view(whole).substr(at, run);
      ranks[turn % 3].add(static_cast<int64_t>(at), std::as_bytes(std::span(part)));
      if (turn % 50 == 49) combined ^= ranks[1].take(static_cast<int64_t>(whole.size()));
    }
    for (CrcSum& rank : ranks) combined ^= rank.take(static_cast<int64_t>(whole.size()));
    EXPECT_EQ(combined, of(whole));
  }
}

}  // namespace
}  // namespace shardow::file

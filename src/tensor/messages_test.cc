#include "tensor/messages.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

#include "shardow/error.h"

namespace shardow {
namespace {

std::vector<Message> all_of(const std::vector<Wanted>& wants, int64_t most = Messages::kMostBytes) {
  Messages messages(
      wants.size(), [&](size_t i) { return wants[i]; }, most);
  std::vector<Message> found;
  while (auto message = messages.next()) found.push_back(std::move(*message));
  return found;
}

int64_t message_bytes(const Message& message) {
  return message.back().at + message.back().bytes;
}

/// A part of a tensor as some sharding would have it: whole, rows, columns, flat, empty.
Wanted any_want(std::mt19937& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  const Shape shape = {below(30), 1 + below(20)};
  const int64_t item = int64_t{1} << below(5);
  const int64_t a = below(shape[0] + 1), b = below(shape[0] + 1), c = below(shape[1] + 1), d = below(shape[1] + 1);
  const Region box = Region::grid(shape, {{{std::min(a, b), std::max(a, b)}}, {{std::min(c, d), std::max(c, d)}}});
  const int64_t begin = below(box.size() + 1), end = begin + below(box.size() - begin + 1);
  return {random() % 2 == 0 ? box : box.window(begin, end), item};
}

TEST(Messages, HaveEachElementOnceInPiecesThatLieApart) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const int64_t most = int64_t{16} << (random() % 9);
    std::vector<Wanted> wants;
    for (size_t left = random() % 40; left > 0; --left) wants.push_back(any_want(random));
    std::vector<int64_t> reached(wants.size(), 0);
    for (const Message& message : all_of(wants, most)) {
      ASSERT_FALSE(message.empty());
      EXPECT_LE(message_bytes(message), most);
      int64_t end = 0;
      for (const MessagePiece& piece : message) {
        EXPECT_EQ(piece.begin, reached[piece.want]);  // in order, without a gap
        reached[piece.want] += piece.region.size();
        ASSERT_LE(reached[piece.want], wants[piece.want].region.size());
        EXPECT_EQ(piece.region, wants[piece.want].region.window(piece.begin, reached[piece.want]));
        EXPECT_EQ(piece.bytes, piece.region.size() * wants[piece.want].item_bytes);
        EXPECT_GT(piece.bytes, 0);
        EXPECT_GE(piece.at, end);
        EXPECT_EQ(piece.at % 16, 0);
        EXPECT_TRUE(message.size() == 1 || piece.bytes <= most / 2);
        end = piece.at + piece.bytes;
      }
    }
    for (size_t i = 0; i < wants.size(); ++i) EXPECT_EQ(reached[i], wants[i].region.size()) << i;
  }
}

TEST(Messages, AreTheSameOnBothSides) {
  std::mt19937 random(4);
  std::vector<Wanted> wants, sent;
  for (int i = 0; i < 200; ++i) {
    wants.push_back(any_want(random));
    sent.push_back({Region::decode(wants.back().region.encode()), wants.back().item_bytes});
  }
  const std::vector<Message> here = all_of(wants, 512), there = all_of(sent, 512);
  ASSERT_EQ(here.size(), there.size());
  for (size_t m = 0; m < here.size(); ++m) {
    ASSERT_EQ(here[m].size(), there[m].size());
    for (size_t p = 0; p < here[m].size(); ++p) {
      const MessagePiece &a = here[m][p], &b = there[m][p];
      EXPECT_TRUE(a.want == b.want && a.region == b.region && a.begin == b.begin && a.at == b.at && a.bytes == b.bytes);
    }
  }
}

TEST(Messages, OfLargePiecesAreAlone) {
  const int64_t most = Messages::kMostBytes;
  const std::vector<Message> messages = all_of({{Region::whole({10}), 4},
                                                {Region::whole({most / 4 + 5}), 4},
                                                {Region::whole({most / 2}), 1},
                                                {Region::whole({most / 2}), 1}});
  ASSERT_EQ(messages.size(), 3u);  // the small ones wait for one another
  EXPECT_EQ(messages[0].size(), 1u);
  EXPECT_EQ(messages[0][0].want, 1u);
  EXPECT_EQ(message_bytes(messages[0]), most);
  EXPECT_EQ(messages[1].size(), 3u);  // want 0, what is left of want 1, the half of want 2
  EXPECT_EQ(messages[1][1].begin, most / 4);
  EXPECT_EQ(messages[1][1].at, 48);
  EXPECT_EQ(messages[1][2].at, 80);
  EXPECT_EQ(message_bytes(messages[1]), 80 + most / 2);
  EXPECT_EQ(messages[2][0].want, 3u);
  EXPECT_EQ(messages[2][0].at, 0);
}

TEST(Messages, OfAMillionSmallWantsAreFullAndAskForEachOnce) {
  constexpr size_t kWants = 1'000'000;
  const Region one = Region::whole({});
  size_t asked = 0;
  Messages messages(kWants, [&](size_t i) {
    EXPECT_EQ(i, asked++);
    return Wanted{one, 4};
  });
  size_t pieces = 0, count = 0;
  while (const auto message = messages.next()) {
    pieces += message->size();
    ++count;
  }
  EXPECT_EQ(asked, kWants);
  EXPECT_EQ(pieces, kWants);
  EXPECT_EQ(count, (kWants * 16 + Messages::kMostBytes - 1) / Messages::kMostBytes);
}

TEST(Messages, OfNothingAreNone) {
  EXPECT_TRUE(all_of({}).empty());
  EXPECT_TRUE(all_of({{Region::whole({0, 3}), 4}, {Region::whole({5}).window(2, 2), 8}}).empty());
}

TEST(Messages, HoldAnElementThatIsLongerThanTheBound) {
  const std::vector<Message> messages = all_of({{Region::whole({2}), 64}, {Region::whole({1}), 4}}, 16);
  ASSERT_EQ(messages.size(), 3u);
  EXPECT_EQ(message_bytes(messages[1]), 64);
}

TEST(Messages, RefuseItemsOfNoBytesAndPassOnWhatTheirSourceThrows) {
  Messages none(1, [](size_t) { return Wanted{Region::whole({1}), 0}; });
  EXPECT_THROW(none.next(), Error);
  Messages failing(1, [](size_t) -> Wanted { throw std::runtime_error("gone"); });
  EXPECT_THROW(failing.next(), std::runtime_error);
}

}  // namespace
}  // namespace shardow

// Every rule of the format, and the files that others' test suites and fuzzers have found worth trying. What the
// reference parser says of the same files is compared in tests/file/test_reference_parser.py.
#include "file/header.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "base/folder_fixture.h"
#include "file/header_fixture.h"
#include "file/layout.h"
#include "shardow/error.h"

namespace shardow::file {
namespace {

std::string message_of(const std::string& json, int64_t data_bytes) {
  try {
    parse_header(json, data_bytes, "model.safetensors");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCorrupt) << error.what();
    EXPECT_EQ(std::string(error.what()).rfind("model.safetensors: ", 0), 0u) << error.what();
    return error.what();
  }
  return "accepted";
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return '"' + name + R"(":{"dtype":")" + dtype + R"(","shape":[)" + shape + R"(],"data_offsets":[)" + offsets + "]}";
}

/// 1,1,1,...
std::string sizes(size_t count) {
  std::string all(2 * count - 1, ',');
  for (size_t i = 0; i < all.size(); i += 2) all[i] = '1';
  return all;
}

struct Case {
  const char* what;
  std::string json;
  int64_t data_bytes;
  const char* says;  ///< a part of the message
};

class Refused : public testing::TestWithParam<Case> {};

TEST_P(Refused, SaysWhy) {
  EXPECT_NE(message_of(GetParam().json, GetParam().data_bytes).find(GetParam().says), std::string::npos)
      << message_of(GetParam().json, GetParam().data_bytes);
}

INSTANTIATE_TEST_SUITE_P(
    Headers, Refused,
    testing::Values(
        Case{"empty", "", 0, "no JSON"}, Case{"not UTF-8", "\xff", 0, "no JSON"}, Case{"open brace", "{", 0, "no JSON"},
        Case{"array", "[]", 0, "no JSON object"}, Case{"null", "null", 0, "no JSON object"},
        Case{"byte order mark", "\xef\xbb\xbf{}", 0, "JSON"},
        Case{"trailing comma", "{\"__metadata__\":{},}", 0, "no JSON"}, Case{"trailing garbage", "{} x", 0, "no JSON"},
        Case{"padding of zeros", std::string("{}\0\0", 4), 0, "no JSON"},
        Case{"lone surrogate", "{\"\\ud800\":1}", 0, "no JSON"},
        Case{"deep in a field", "{\"a\":{\"x\":" + std::string(200, '[') + std::string(200, ']') + "}}", 0, "no JSON"},
        Case{"as deep as the reference parser refuses",
             R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"x":)" + std::string(126, '[') +
                 std::string(126, ']') + "}}",
             4, "no JSON"},
        Case{"very deep", std::string(100000, '['), 0, "no JSON"},
        Case{"entry is a number", R"({"a":1})", 0, "no object"},
        Case{"no dtype", R"({"a":{"shape":[],"data_offsets":[0,4]}})", 4, "lacks its dtype"},
        Case{"no shape", R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "lacks its shape"},
        Case{"no offsets", R"({"a":{"dtype":"F32","shape":[]}})", 4, "lacks its data_offsets"},
        Case{"unknown dtype", "{" + tensor("a", "F33", "", "0,4") + "}", 4, "unknown dtype 'F33'"},
        Case{"dtype is a number", R"({"a":{"dtype":1,"shape":[],"data_offsets":[0,4]}})", 4, "no text"},
        Case{"float size", "{" + tensor("a", "F32", "2.0", "0,8") + "}", 8, "no unsigned integer"},
        Case{"exponent", "{" + tensor("a", "F32", "2e0", "0,8") + "}", 8, "no unsigned integer"},
        Case{"negative size", "{" + tensor("a", "F32", "-2", "0,8") + "}", 8, "no unsigned integer"},
        Case{"negative zero", "{" + tensor("a", "F32", "-0", "0,0") + "}", 0, "-0"},
        Case{"size as text", "{" + tensor("a", "F32", "\"2\"", "0,8") + "}", 8, "no unsigned integer"},
        Case{"2^64", "{" + tensor("a", "F32", "18446744073709551616", "0,8") + "}", 8, "JSON"},
        Case{"2^64 - 1", "{" + tensor("a", "F32", "18446744073709551615", "0,8") + "}", 8, "too large"},
        Case{"product overflows", "{" + tensor("a", "I32", "2,9223372036854775807", "0,16") + "}", 16,
             "more bytes than 2^63"},
        Case{"product overflows 128 bits",
             "{" + tensor("a", "I32", "9223372036854775807,9223372036854775807,9223372036854775807", "0,16") + "}", 16,
             "more bytes"},
        Case{"one offset", "{" + tensor("a", "F32", "1", "0") + "}", 4, "not two numbers"},
        Case{"three offsets", "{" + tensor("a", "F32", "1", "0,4,8") + "}", 4, "not two numbers"},
        Case{"begin after end", "{" + tensor("a", "F32", "1", "4,0") + "}", 4, "one after another"},
        Case{"first not at 0", "{" + tensor("a", "F32", "1", "4,8") + "}", 8, "one after another"},
        Case{"hole", "{" + tensor("a", "F32", "1", "0,4") + "," + tensor("b", "F32", "1", "8,12") + "}", 12,
             "'b' has bytes [8, 12) where byte 4"},
        Case{"overlap", "{" + tensor("a", "F32", "2", "0,8") + "," + tensor("b", "F32", "2", "4,12") + "}", 12, "'b'"},
        Case{"too few bytes", "{" + tensor("a", "I32", "2,2", "0,4") + "}", 4, "takes 16 bytes and has 4"},
        Case{"four bits", "{" + tensor("a", "F4", "1,3", "0,2") + "}", 2, "whole number of bytes"},
        Case{"four bits, size", "{" + tensor("a", "F4", "1,2", "0,2") + "}", 2, "takes 1 bytes and has 2"},
        Case{"cut off", "{" + tensor("a", "F32", "2", "0,8") + "}", 6, "end at byte 8 of the data, which has 6"},
        Case{"polyglot", "{" + tensor("a", "F32", "2", "0,8") + "}", 40, "something else"},
        Case{"same name", "{" + tensor("a", "F32", "1", "0,4") + "," + tensor("a", "F32", "1", "4,8") + "}", 8,
             "'a' is there twice"},
        Case{"same name, escaped",
             "{" + tensor("a", "F32", "1", "0,4") + "," + tensor("\\u0061", "F32", "1", "4,8") + "}", 8,
             "'a' is there twice"},
        Case{"two metadata", R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
        Case{"metadata key", R"({"__metadata__":{"k":"a","k":"b"}})", 0, "'k' twice"},
        Case{"field", R"({"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4, "'dtype' twice"},
        Case{"a size for every byte", "{" + tensor("a", "F32", sizes(600'000), "0,8") + "}", 8, "is described by"},
        Case{"text without end", R"({"a":{"dtype":"F32)", 0, "no JSON"},
        Case{"no comma", R"({"__metadata__":{} "a":{}})", 0, "no JSON"}, Case{"no colon", R"({"a" {}})", 0, "no JSON"},
        Case{"no value", R"({"a":})", 0, "no JSON"},
        Case{"brackets that do not match", R"({"a":{"x":[}]}})", 0, "no JSON"},
        Case{"brackets in a text", R"({"a":"}"})", 0, "no object"},
        Case{"metadata is cut off", R"({"__metadata__":{"k":"a"]})", 0, "no JSON"},
        Case{"metadata number", R"({"__metadata__":{"k":1}})", 0, "no text"},
        Case{"metadata null", R"({"__metadata__":{"k":null}})", 0, "no text"},
        Case{"metadata list", R"({"__metadata__":[]})", 0, "no object"},
        Case{"metadata is a tensor", "{" + tensor("__metadata__", "F32", "1", "0,4") + "}", 4, "no text"}),
    [](const auto& tested) {
      std::string name = tested.param.what;
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name + "_" + std::to_string(tested.index);
    });

TEST(Header, TakesWhatTheReferenceParserTakes) {
  EXPECT_TRUE(parse_header("{}", 0, "f").entries.empty());
  EXPECT_TRUE(parse_header(" \t\n{}   ", 0, "f").entries.empty());
  EXPECT_TRUE(parse_header(R"({"__metadata__":null})", 0, "f").metadata.empty());
  const std::string deep = std::string(125, '[') + std::string(125, ']');
  EXPECT_EQ(
      parse_header(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"x":)" + deep + "}}", 4, "f").entries.size(),
      1u);
  EXPECT_EQ(parse_header(R"({"__metadata__":{"format":"pt","-0":"-0"}})", 0, "f").metadata.at("format"), "pt");
  const Header header =
      parse_header("{" + tensor("b", "F32", "1", "6,10") + "," + tensor("", "BF16", "", "0,2") + "," +
                       tensor("z\\u0000", "I64", "3,0", "2,2") + "," +
                       R"("x":{"dtype":"U8","shape":[4],"data_offsets":[2,6],"unknown":{"a":[1.5]}})" + "}",
                   10, "f");
  ASSERT_EQ(header.entries.size(), 4u);
  EXPECT_EQ(header.entries[0].name, "");
  EXPECT_EQ(header.entries[1].name, std::string("z\0", 2));
  EXPECT_EQ(header.entries[1].shape, (Shape{3, 0}));
  EXPECT_EQ(header.entries[3].begin, 6);
  EXPECT_EQ(data_size(header), 10);
}

TEST(Header, ComesBackFromItsBytes) {
  const Header laid = lay_out({{"tail", DType::kU8, {3}, 0, 0},
                               {"b \"quoted\\ \n", DType::kF32, {2, 3}, 0, 0},
                               {"a", DType::kF32, {}, 0, 0},
                               {"empty", DType::kBF16, {0, 7}, 0, 0},
                               {"wide", DType::kF64, {1}, 0, 0},
                               {"packed", DType::kF4, {4}, 0, 0}},
                              {{"format", "pt"}, {"k", "\x01\u00e9"}});
  const std::string bytes = header_bytes(laid.entries, laid.metadata, laid.data_begin);
  EXPECT_EQ(bytes.size() % 4096, 0u);
  EXPECT_EQ(laid.data_begin, static_cast<int64_t>(bytes.size()));
  const Header read = parse_header(std::string_view(bytes).substr(8), data_size(laid), "f");
  EXPECT_EQ(read.metadata, laid.metadata);
  ASSERT_EQ(read.entries.size(), 6u);
  const char* names[] = {"wide", "a", "b \"quoted\\ \n", "empty", "tail", "packed"};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(read.entries[i].name, names[i]);
    EXPECT_EQ(read.entries[i].shape, laid.entries[i].shape);
    EXPECT_EQ(read.entries[i].begin, laid.entries[i].begin);
  }
  EXPECT_EQ(data_size(laid), 8 + 4 + 24 + 0 + 3 + 2);
}

TEST(Header, OfAnEmptyTensorTakesAnySizes) {
  const Header laid = lay_out({{"a", DType::kF32, {int64_t{1} << 62, 4, 0}, 0, 0}, {"b", DType::kF32, {2}, 0, 0}}, {});
  EXPECT_EQ(data_size(laid), 8);
  EXPECT_THROW(lay_out({{"a", DType::kF32, {int64_t{1} << 62, 4}, 0, 0}}, {}), Error);
}

TEST(Header, OfManyTensorsIsDividedByMaxShardSize) {
  std::vector<Shared> all;
  for (int i = 0; i < 1200; ++i) {
    const std::string name = std::to_string(10'000 + i) + std::string(100'000, 'n');
    all.push_back({name, DType::kU8, {2}, Shared::Pieces({{Region::whole({2}), {0}}})});
  }
  const std::vector<Volume> volumes = {{"", std::make_shared<const std::vector<Shared>>(std::move(all)), {}}};
  EXPECT_THROW(Layout(volumes, SaveOptions()), Error);
  const Layout layout(volumes, {.max_shard_size = int64_t{1} << 30});
  EXPECT_GT(layout.files().size(), 2u);
  size_t tensors = 0;
  for (const FilePlan& file : layout.files()) {
    EXPECT_LE(file.data_begin, kMostHeaderBytes);
    tensors += file.tensors.size();
  }
  EXPECT_EQ(tensors, 1200u);
}

TEST(Header, OfFilesIsDividedWhereTheNextTensorDoesNotFit) {
  std::vector<Shared> all;
  for (const char* const name : {"a", "b", "c"})
    all.push_back({name, DType::kU8, {8}, Shared::Pieces({{Region::whole({8}), {0}}})});
  const std::vector<Volume> volumes = {{"", std::make_shared<const std::vector<Shared>>(std::move(all)), {}}};
  for (const auto& [most, files] : {std::pair(7, 3), {8, 3}, {15, 3}, {16, 2}, {23, 2}, {24, 1}}) {
    const Layout layout(volumes, {.max_shard_size = most});
    EXPECT_EQ(layout.files().size(), static_cast<size_t>(files)) << most;
  }
}

TEST(Header, IsNotWrittenWhereNoReaderWouldTakeIt) {
  EXPECT_THROW(lay_out({{"\xff", DType::kU8, {}, 0, 0}}, {}), Error);
  EXPECT_THROW(lay_out({{"__metadata__", DType::kU8, {}, 0, 0}}, {}), Error);
  EXPECT_THROW(lay_out({{"a", DType::kU8, {}, 0, 0}, {"a", DType::kF32, {}, 0, 0}}, {}), Error);
  EXPECT_THROW(lay_out({}, {{"long", std::string(static_cast<size_t>(kMostHeaderBytes), 'x')}}), Error);
}

TEST(Header, OfAMillionTensors) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "one thread, and minutes under ThreadSanitizer";
#endif
  std::vector<Entry> entries;
  for (int i = 0; i < 1'000'000; ++i) entries.push_back({std::to_string(i), DType::kU8, {1}, 0, 0});
  const Header laid = lay_out(std::move(entries), {});
  const std::string bytes = header_bytes(laid.entries, laid.metadata, laid.data_begin);
  EXPECT_EQ(parse_header(std::string_view(bytes).substr(8), 1'000'000, "f").entries.size(), 1'000'000u);
}

class Files : public InFolder {
 protected:
  Code code_of(const std::string& bytes) {
    std::filesystem::remove(path_);
    base::File file = base::File::create(path_);
    file.write(std::as_bytes(std::span(bytes)), 0);
    file.close();
    try {
      const HeaderText text = read_header(base::File::open(path_));
      parse_header(text.json, text.data_bytes, "f");
    } catch (const Error& error) {
      return error.code();
    }
    return Code::kInternal;  // accepted
  }

  static std::string length(uint64_t n) { return {reinterpret_cast<const char*>(&n), 8}; }

  const base::Path path_ = folder_ / "header.safetensors";
};

TEST_F(Files, AreMeasuredBeforeTheyAreBelieved) {
  EXPECT_EQ(code_of(""), Code::kCorrupt);
  EXPECT_EQ(code_of("1234567"), Code::kCorrupt);
  EXPECT_EQ(code_of(length(0)), Code::kCorrupt);  // a file before its last write
  EXPECT_EQ(code_of(length(1000) + "{}"), Code::kCorrupt);
  EXPECT_EQ(code_of(length(0xFFFFFF000000003C) + "{}"), Code::kCorrupt);
  EXPECT_EQ(code_of(length(100'000'001) + "{}"), Code::kCorrupt);
  EXPECT_EQ(code_of(length(2) + "{}"), Code::kInternal);
  EXPECT_EQ(code_of(length(2) + "{}extra_bogus_data_for_polyglot_file"), Code::kCorrupt);
}

TEST_F(Files, OfTheLargestHeaderAreRead) {
  std::string bytes = length(100'000'000) + "{}";
  bytes.resize(8 + 100'000'000, ' ');
  EXPECT_EQ(code_of(bytes), Code::kInternal);
}

}  // namespace
}  // namespace shardow::file

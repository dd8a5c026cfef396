#include "cli/manifest.h"

#include <gtest/gtest.h>

#include "cli/sha256.h"
#include "shardow/error.h"

namespace shardow::cli {
namespace {

const std::string kSome(64, 'a'), kOther(64, '0');

TEST(Sha256, IsTheStandards) {  // FIPS 180-4's examples
  Sha256 empty, abc;
  EXPECT_EQ(empty.hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  for (const char c : std::string("abc")) abc.add(std::as_bytes(std::span(&c, 1)));
  EXPECT_EQ(abc.hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Manifest, IsReadAsItWasWritten) {
  const Digests digests = {
      {"plain", kSome}, {"two words", kOther}, {"new\nline", kSome}, {"back\\slash\r", kOther}, {" *x", kSome}};
  EXPECT_EQ(parse_manifest(to_text(digests), "m"), digests);
  EXPECT_EQ(to_text({{"a\nb", kSome}}), "\\" + kSome + "  a\\nb\n");
}

TEST(Manifest, TakesWhatSha256sumWrites) {
  EXPECT_EQ(parse_manifest(kSome + " *binary\r\n\n# a comment\n" + std::string(64, 'A') + "  ./upper", "m"),
            (Digests{{"binary", kSome}, {"upper", kSome}}));
}

TEST(Manifest, TakesTagsAndFilesBelow) {
  EXPECT_EQ(
      parse_manifest("SHA256 (a (1) = b) = " + kSome + "\n\\SHA256 (x\\ny) = " + kOther + "\n" + kSome + "  sub/deep/x",
                     "m"),
      (Digests{{"a (1) = b", kSome}, {"x\ny", kOther}, {"sub/deep/x", kSome}}));
}

TEST(Manifest, RefusesAllElse) {
  for (const std::string& line : {std::string("x"),
                                  kSome,
                                  kSome + "  ",
                                  kSome + " name",
                                  kSome.substr(1) + "  name",
                                  "g" + kSome.substr(1) + "  name",
                                  kSome + "  ../x",
                                  kSome + "  /x",
                                  kSome + "  .",
                                  kSome + "  a//b",
                                  kSome + "  a/../b",
                                  kSome + "  a/",
                                  "SHA256 (../x) = " + kSome,
                                  "SHA256 (x) - " + kSome,
                                  "SHA256 () = " + kSome,
                                  "SHA256 (x) = " + kSome.substr(1),
                                  "\\" + kSome + "  a\\x",
                                  "\\" + kSome + "  a\\",
                                  kSome + "  a\n" + kOther + "  a",
                                  kSome + "  a" + std::string(1, '\0')}) {
    EXPECT_THROW(parse_manifest(line, "m"), Error) << line;
  }
}

}  // namespace
}  // namespace shardow::cli

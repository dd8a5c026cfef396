// Neighbours' regions differ in few numbers, and regularly: the differences are told, compressed.
#include "file/kinds.h"

#include <zlib.h>

#include <utility>

#include "base/errors.h"
#include "base/leb128.h"
#include "group/wire.h"

namespace shardow::file {
namespace {

using base::fail;
using base::NumberReader;
using base::put_number;
using group::Receiver;
using group::Sender;

/// An encoded region is a list of numbers of seven bits a byte; see region_text.cc.
using Numbers = std::vector<uint64_t>;

Numbers numbers_in(std::string_view encoded) {
  Numbers numbers;
  for (NumberReader in(encoded, "an encoded region"); in.left() > 0;) numbers.push_back(in.next());
  return numbers;
}

std::string encoded(const Numbers& numbers) {
  std::string out;
  for (const uint64_t number : numbers) put_number(out, number);
  return out;
}

/// Regions as differences from the one before; a count that differs begins anew.
class Differences {
 public:
  std::string next(const std::string& region) {
    const Numbers now = numbers_in(region);
    last_.resize(now.size(), 0);
    std::string out;
    put_number(out, now.size());
    for (size_t i = 0; i < now.size(); ++i) {
      const uint64_t apart = now[i] - last_[i];
      put_number(out, (apart << 1) ^ (0 - (apart >> 63)));  // small whatever its sign
    }
    last_ = now;
    return out;
  }

  std::string next(const Numbers& differences) {
    last_.resize(differences.size(), 0);
    for (size_t i = 0; i < differences.size(); ++i) last_[i] += (differences[i] >> 1) ^ (0 - (differences[i] & 1));
    return encoded(last_);
  }

 private:
  Numbers last_;
};

}  // namespace

std::string packed(const std::string& bytes) {
  std::string out(::compressBound(bytes.size()), '\0');
  uLongf size = out.size();
  ::compress2(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size(),
              1);
  out.resize(size);
  Sender sender;
  sender.number(static_cast<int64_t>(bytes.size()));
  return sender.bytes() + out;
}

std::string unpacked(std::string_view bytes) {
  Receiver in(bytes.substr(0, sizeof(int64_t)));
  std::string out(static_cast<size_t>(in.number()), '\0');
  bytes.remove_prefix(sizeof(int64_t));
  uLongf size = out.size();
  const int found = ::uncompress(reinterpret_cast<Bytef*>(out.data()), &size,
                                 reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  if (found != Z_OK || size != out.size()) fail(Code::kInternal, "what another rank has compressed cannot be read");
  return out;
}

std::string pack(const std::vector<Kind>& kinds) {
  std::string out;
  put_number(out, kinds.size());
  for (const Kind& kind : kinds) {
    put_number(out, kind.ranks.size());
    int64_t last = 0;
    for (const int64_t rank : kind.ranks) put_number(out, static_cast<uint64_t>(rank - std::exchange(last, rank)));
    put_number(out, kind.regions.size());
    for (const auto& of_class : kind.regions) {
      Differences differences;
      for (const std::string& region : of_class) out += differences.next(region);
    }
    const std::string list = kinds.size() > 1 ? kind.list : std::string();
    put_number(out, list.size());
    out += list;
  }
  return packed(out);
}

std::vector<Kind> unpack(const std::string& said) {
  const std::string bytes = unpacked(said);
  NumberReader in(bytes, "what another rank tells of kinds");
  std::vector<Kind> kinds(in.next());
  for (Kind& kind : kinds) {
    kind.ranks.resize(in.next());
    int64_t last = 0;
    for (int64_t& rank : kind.ranks) rank = last += static_cast<int64_t>(in.next());
    kind.regions.resize(in.next());
    for (auto& of_class : kind.regions) {
      Differences differences;
      for (size_t i = 0; i < kind.ranks.size(); ++i) {
        Numbers numbers(in.next());
        for (uint64_t& number : numbers) number = in.next();
        of_class.push_back(differences.next(numbers));
      }
    }
    kind.list = in.text(in.next());
  }
  return kinds;
}

}  // namespace shardow::file

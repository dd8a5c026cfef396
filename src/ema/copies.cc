// Checksums, joined: who has the same keys (names and regions) must have the same sums. All that a rank holds whole is
// one such set, and all that it holds a part of is another.
#include "ema/copies.h"

#include <map>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "comm/digest.h"
#include "comm/wire.h"
#include "file/crc.h"
#include "tensor/dtype.h"

namespace shardow::ema {
namespace {

using comm::Receiver;
using comm::Sender;

bool is_whole(const Region& region) {
  return region == Region::whole(region.shape());
}

uint32_t checksum(const TensorView& view) {
  const auto bytes = static_cast<size_t>(byte_size(view.dtype, view.region.size()));
  return file::crc32(0, {static_cast<const std::byte*>(view.data), bytes});
}

/// (digest of the keys, digest of the sums) of a list of both.
std::pair<int64_t, int64_t> digests(std::string_view list) {
  std::string keys;
  Sender sums;
  for (Receiver in(list); !in.done();) {
    keys += in.text() + in.text();
    sums.number(in.number());
  }
  return {static_cast<int64_t>(comm::digest(keys)), static_cast<int64_t>(comm::digest(sums.bytes()))};
}

struct First {
  size_t rank;
  int64_t sum;
};

[[noreturn]] void refuse(const std::vector<std::string>& everybody) {
  std::map<std::pair<std::string, std::string>, First> first;
  for (size_t rank = 0; rank < everybody.size(); ++rank) {
    for (Receiver in(everybody[rank]); !in.done();) {
      std::string name = in.text(), region = in.text();
      const int64_t sum = in.number();
      const auto [found, is_new] = first.try_emplace({std::move(name), std::move(region)}, First{rank, sum});
      if (is_new || found->second.sum == sum) continue;
      base::fail(Code::kInvalidArgument,
                 "save(): the average of '{}' has other values on rank {} than on rank {}, and a file takes one rank's "
                 "for all: begin with "
                 "the same weights on all ranks that hold the same, and give them the same steps",
                 found->first.first, found->second.rank, rank);
    }
  }
  base::fail(Code::kInternal, "save(): sums of copies differ, and no copy does");
}

}  // namespace

Copies::Copies(std::span<const SaveFile> files) {
  Sender whole, rest;
  for (const SaveFile& file : files) {
    for (const TensorView& view : file.tensors) {
      if (view.device.kind != Device::Kind::kCpu) continue;
      Sender& to = is_whole(view.region) ? whole : rest;
      to.text(view.name);
      to.text(file.name + view.region.encode());
      to.number(checksum(view));
    }
  }
  whole_ = whole.bytes();
  rest_ = rest.bytes();
  all_ = whole_ + rest_;
}

std::string Copies::summary() const {
  Sender out;
  for (const std::string& list : {whole_, rest_}) {
    const auto [keys, sums] = digests(list);
    out.number(keys);
    out.number(sums);
  }
  return out.bytes();
}

void check_copies(Group& group, const Copies& mine, Deadline deadline) {
  if (group.size() == 1) return;
  std::map<int64_t, int64_t> sums;
  bool same = true;
  for (const std::string& one : group.all_gather(mine.summary(), deadline)) {
    for (Receiver in(one); !in.done();) {
      const int64_t key = in.number(), sum = in.number();
      same = same && sums.try_emplace(key, sum).first->second == sum;
    }
  }
  if (!same) refuse(group.all_gather(mine.all(), deadline));
}

}  // namespace shardow::ema

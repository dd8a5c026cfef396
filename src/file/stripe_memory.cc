// The handshake has two rounds: addresses, each with a nonce that lies in the memory and tells whether the address led
// to the right one, and who has reached whom.
#include "file/stripe_memory.h"

#include <cstring>
#include <string>

#include "base/errors.h"
#include "base/nonce.h"
#include "base/turns.h"
#include "comm/wire.h"

namespace shardow::file {
namespace {

constexpr size_t kNonceBytes = 16;

}  // namespace

StripeMemory::StripeMemory(Group& group, size_t bytes, std::chrono::milliseconds timeout)
    : of_(static_cast<size_t>(group.size())), reached_by_(static_cast<size_t>(group.size()), false) {
  const std::string nonce = base::make_nonce();
  comm::Sender offer;
  try {
    own_ = base::SharedMemory::create(bytes);
    std::memcpy(own_->bytes().data(), nonce.data(), kNonceBytes);
    offer.text(own_->address());
    offer.text(nonce);
  } catch (const Error&) {  // then what others have is sent
    alone_.resize(bytes);
    offer.text("");
    offer.text("");
  }
  const std::vector<std::string> offers = group.all_gather(offer.bytes(), base::now() + timeout);
  std::string found;
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    comm::Receiver in(offers[rank]);
    const std::string address = in.text(), expected = in.text();
    if (static_cast<int>(rank) != group.rank() && !address.empty())
      of_[rank] = base::SharedMemory::open(address, bytes);
    if (of_[rank] && std::memcmp(of_[rank]->bytes().data(), expected.data(), kNonceBytes) != 0) of_[rank].reset();
    found += of_[rank] ? '1' : '0';
  }
  const std::vector<std::string> all = group.all_gather(found, base::now() + timeout);
  for (size_t rank = 0; rank < all.size(); ++rank)
    reached_by_[rank] = all[rank].at(static_cast<size_t>(group.rank())) == '1';
}

}  // namespace shardow::file

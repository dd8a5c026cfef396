// libcrypto's own functions rather than its EVP layer: statically linked, that one would bring all of the library's
// providers, 5 MB.
#define OPENSSL_API_COMPAT 10100  // they are deprecated from 3.0 on
#include "cli/sha256.h"

#include <fmt/format.h>
#include <openssl/sha.h>

namespace shardow::cli {

struct Sha256::State {
  SHA256_CTX context;
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  SHA256_Init(&state_->context);
}

Sha256::~Sha256() = default;

void Sha256::add(std::span<const std::byte> bytes) {
  SHA256_Update(&state_->context, bytes.data(), bytes.size());
}

std::string Sha256::hex() {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256_Final(digest.data(), &state_->context);
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

}  // namespace shardow::cli

// The twin of cuda.cu and cuda_device.cc in builds without a CUDA toolkit: it has no device and says how to get one.
#include "kernels/cuda.h"
#include "shardow/error.h"

namespace shardow::kernels::cuda {
namespace {

constexpr const char* kWhyNot =
    "this build of shardow has no CUDA kernels; build it where nvcc is found (or set CMAKE_CUDA_COMPILER), with "
    "SHARDOW_CUDA=ON to insist";

[[noreturn]] void refuse() {
  throw Error(Code::kUnsupported, kWhyNot);
}

}  // namespace

bool built() noexcept {
  return false;
}
bool available() noexcept {
  return false;
}
const char* why_not() noexcept {
  return kWhyNot;
}

bool capturing(const Device& /*device*/) {
  return false;
}
std::unique_ptr<Table> upload(std::span<const Chunk> /*chunks*/, Device /*device*/) {
  refuse();
}
void swap(void* /*parameter*/, DType /*parameter_dtype*/, void* /*average*/, DType /*average_dtype*/, int64_t /*count*/,
          Direction /*direction*/, Device /*device*/) {
  refuse();
}
void cast(const void* /*from*/, DType /*from_dtype*/, void* /*to*/, DType /*to_dtype*/, int64_t /*count*/,
          Device /*device*/) {
  refuse();
}
void* allocate(size_t /*bytes*/, int /*index*/) {
  refuse();
}
void release(void* /*memory*/, int /*index*/) noexcept {}
void* pin(size_t /*bytes*/, int /*index*/) {
  refuse();
}
void unpin(void* /*memory*/, int /*index*/) noexcept {}
std::unique_ptr<Copy> begin_copy(void* /*to*/, const void* /*from*/, size_t /*bytes*/, Device /*device*/) {
  refuse();
}

std::unique_ptr<Link> make_link(int /*index*/, size_t /*num_marks*/) {
  refuse();
}

}  // namespace shardow::kernels::cuda

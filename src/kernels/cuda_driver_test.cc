// The driver's functions as the engine declares them, beside NVIDIA's own header where a toolkit is installed.
#include "kernels/cuda_driver.h"

#include <gtest/gtest.h>

#if __has_include(<cuda.h>)
#include <cuda.h>

#include <type_traits>

namespace shardow::kernels::cuda {
namespace {

/// A parameter as it is passed: handles and device addresses are pointers, enumerations are integers.
template <class T>
struct Passed {
  using type = std::conditional_t<std::is_enum_v<T>, int, std::conditional_t<std::is_same_v<T, CUdeviceptr>, void*, T>>;
};
template <class T>
struct Passed<const T> : Passed<T> {};
template <class T>
struct Passed<T*> {
  using type = std::conditional_t<std::is_class_v<T>, void*, typename Passed<T>::type*>;
};

template <class Function>
struct As;
template <class Result, class... Parameters>
struct As<Result (*)(Parameters...)> {
  using type = int (*)(typename Passed<Parameters>::type...);
};

template <class OfOurs, class OfNvidia>
constexpr bool kSame = std::is_same_v<typename As<typename OfOurs::Function>::type, typename As<OfNvidia>::type>;

#define SAME(ours, nvidias) static_assert(kSame<decltype(Driver::ours), decltype(&nvidias)>, #nvidias)
SAME(init, cuInit);
SAME(version, cuDriverGetVersion);
SAME(error_name, cuGetErrorName);
SAME(error_string, cuGetErrorString);
SAME(device_count, cuDeviceGetCount);
SAME(device, cuDeviceGet);
SAME(device_name, cuDeviceGetName);
SAME(device_attribute, cuDeviceGetAttribute);
SAME(retain_primary_context, cuDevicePrimaryCtxRetain);
SAME(push_context, cuCtxPushCurrent);
SAME(pop_context, cuCtxPopCurrent);
SAME(synchronize_context, cuCtxSynchronize);
SAME(allocate, cuMemAlloc);
SAME(address_range, cuMemGetAddressRange);
SAME(free, cuMemFree);
SAME(allocate_pinned, cuMemHostAlloc);
SAME(free_pinned, cuMemFreeHost);
SAME(copy, cuMemcpyAsync);
SAME(set, cuMemsetD8Async);
SAME(create_stream, cuStreamCreate);
SAME(destroy_stream, cuStreamDestroy);
SAME(synchronize, cuStreamSynchronize);
SAME(wait_for_event, cuStreamWaitEvent);
SAME(is_capturing, cuStreamIsCapturing);
SAME(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
SAME(create_event, cuEventCreate);
SAME(destroy_event, cuEventDestroy);
SAME(record, cuEventRecord);
SAME(wait, cuEventSynchronize);
SAME(load_module, cuModuleLoadData);
SAME(function, cuModuleGetFunction);
SAME(launch, cuLaunchKernel);

static_assert(kOutOfDeviceMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kMultiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kPortable == CU_MEMHOSTALLOC_PORTABLE && kNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kBlockingSync == CU_EVENT_BLOCKING_SYNC && kDisableTiming == CU_EVENT_DISABLE_TIMING);

TEST(DriverSignatures, AreThoseOfTheToolkitsHeader) {
  EXPECT_GE(CUDA_VERSION, 12000);
}

}  // namespace
}  // namespace shardow::kernels::cuda

#else

TEST(DriverSignatures, AreThoseOfTheToolkitsHeader) {
  GTEST_SKIP() << "no cuda.h: set CPLUS_INCLUDE_PATH to a toolkit's headers";
}

#endif

// Which mutex guards what, checked by clang's -Wthread-safety; nothing elsewhere. See Mutex in mutex.h.
#pragma once

#if defined(__clang__)
#define SHARDOW_ANNOTATE(x) __attribute__((x))
#else
#define SHARDOW_ANNOTATE(x)
#endif

#define SHARDOW_CAPABILITY SHARDOW_ANNOTATE(capability("mutex"))
#define SHARDOW_SCOPED_CAPABILITY SHARDOW_ANNOTATE(scoped_lockable)
#define SHARDOW_GUARDED_BY(mutex) SHARDOW_ANNOTATE(guarded_by(mutex))  // data: touched only while holding `mutex`
#define SHARDOW_REQUIRES(mutex) SHARDOW_ANNOTATE(requires_capability(mutex))  // function: the caller holds `mutex`
#define SHARDOW_ACQUIRE(...) SHARDOW_ANNOTATE(acquire_capability(__VA_ARGS__))
#define SHARDOW_RELEASE(...) SHARDOW_ANNOTATE(release_capability(__VA_ARGS__))
#define SHARDOW_NO_THREAD_SAFETY_ANALYSIS \
  SHARDOW_ANNOTATE(no_thread_safety_analysis)  // function: locks here what is unlocked elsewhere

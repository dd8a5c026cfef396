// What this machine's libstdc++ and our own code ask of glibc after 2.27, in words of glibc 2.27. Linked into a wheel's module
// alone, and hidden there. Whoever asks for more is named by check.py or by auditwheel.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/random.h>
#include <time.h>

#ifdef __x86_64__
#define FIRST "GLIBC_2.2.5"
#else
#define FIRST "GLIBC_2.17"
#endif

// 2.29 gave these a second version, which differs in how errors are reported; both compute the same.
double first_exp(double x);
double first_log(double x);
double first_pow(double x, double y);
__asm__(".symver first_exp, exp@" FIRST);
__asm__(".symver first_log, log@" FIRST);
__asm__(".symver first_pow, pow@" FIRST);
double exp(double x) {
  return first_exp(x);
}
double log(double x) {
  return first_log(x);
}
double pow(double x, double y) {
  return first_pow(x, y);
}

// 2.30. Where it is not, a wait by another clock in steps of at most a second: a step that ends too soon is one of the wake-ups that nobody
// asked for, which every caller allows for, so that the wall clock may jump.
typedef int ClockWait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const struct timespec* until) {
  static ClockWait* newer;
  static int asked;
  if (!__atomic_load_n(&asked, __ATOMIC_ACQUIRE)) {
    __atomic_store_n(&newer, (ClockWait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"), __ATOMIC_RELAXED);
    __atomic_store_n(&asked, 1, __ATOMIC_RELEASE);
  }
  ClockWait* const wait = __atomic_load_n(&newer, __ATOMIC_RELAXED);
  if (wait) return wait(condition, mutex, clock, until);
  struct timespec now;
  clock_gettime(clock, &now);
  int64_t left = (int64_t)(until->tv_sec - now.tv_sec) * 1000000000 + (until->tv_nsec - now.tv_nsec);
  if (left <= 0) return ETIMEDOUT;
  if (left > 1000000000) left = 1000000000;
  clock_gettime(CLOCK_REALTIME, &now);
  left += now.tv_nsec;
  const struct timespec end = {now.tv_sec + left / 1000000000, left % 1000000000};
  return pthread_cond_timedwait(condition, mutex, &end);
}

// 2.32: whether the process has one thread, for which libstdc++ then leaves out locked instructions.
char __libc_single_threaded = 0;

// 2.36, for std::random_device.
uint32_t arc4random(void) {
  uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
  }
  return value;
}

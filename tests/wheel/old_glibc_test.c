// tools/wheel/old_glibc.c where glibc has none of it: dlsym() finds nothing. Exit status: the line of the first check that fails.
#include "../../tools/wheel/old_glibc.c"

#include <unistd.h>

#define CHECK(what) \
  if (!(what)) return __LINE__ % 256

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static int ready;

static void* wake(void* nothing) {
  usleep(50000);
  pthread_mutex_lock(&mutex);
  ready = 1;
  pthread_cond_signal(&condition);
  pthread_mutex_unlock(&mutex);
  return nothing;
}

static struct timespec after(double seconds) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t end = now.tv_sec * 1000000000LL + now.tv_nsec + (int64_t)(seconds * 1e9);
  return (struct timespec){end / 1000000000, end % 1000000000};
}

static double until(const struct timespec* end) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)(end->tv_sec - now.tv_sec) + (end->tv_nsec - now.tv_nsec) / 1e9;
}

int main(void) {
  pthread_mutex_lock(&mutex);
  struct timespec end = after(0.1);
  CHECK(pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &end) == ETIMEDOUT);
  CHECK(until(&end) <= 0);
  CHECK(pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &end) == ETIMEDOUT);  // at once

  end = after(3600);  // comes back within a step, and says so
  CHECK(pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &end) == ETIMEDOUT);
  CHECK(until(&end) > 3500);

  pthread_t waker;
  pthread_create(&waker, NULL, wake, NULL);
  end = after(60);
  while (!ready) pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &end);
  pthread_mutex_unlock(&mutex);
  pthread_join(waker, NULL);
  CHECK(until(&end) > 30);

  CHECK(exp(0) == 1 && log(1) == 0 && pow(2, 0.5) * pow(2, 0.5) > 1.999 && pow(3, 2) == 9);
  CHECK(arc4random() != arc4random() || arc4random() != arc4random());
  return 0;
}

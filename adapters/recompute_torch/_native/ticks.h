// A clock that costs a few nanoseconds. Its unit does not matter to the policy; for people it is compared with the
// system's clock since the block was opened.

#if defined(__x86_64__)
#include <x86intrin.h>
inline uint64_t ticks() { return __rdtsc(); }
#elif defined(__aarch64__)
inline uint64_t ticks() {
  uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
}
#else
inline uint64_t ticks() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
#endif

struct Era {  // from the opening of a block
  uint64_t ticks_then = ticks();
  std::chrono::steady_clock::time_point then = std::chrono::steady_clock::now();
  double seconds_a_tick() const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
    return seconds / std::max<double>(1, double(ticks() - ticks_then));
  }
};

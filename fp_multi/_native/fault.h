// Fault injection for tests: every system call and completion of the engine asks here first.
// Unarmed, a check is one relaxed atomic load.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fp::fault {

enum class Point : uint8_t {
  open,
  statx,
  fallocate,
  ftruncate,
  fdatasync,
  fsync,
  sync_file_range,
  close,
  mkdir,
  rename,
  unlink,
  pwrite,
  pread,
  mmap,
  uring_setup,
  uring_enter,
  write_completion,
  read_completion,
  count_
};

struct Injection {
  int error = 0;              // errno to fail with
  int64_t short_nbytes = -1;  // >= 0: a completion is cut to this many bytes
};

extern std::atomic<bool> armed;

// Slow path of hit(): counts the call and says what to inject, if anything. May SIGKILL the
// process.
bool check(Point point, Injection& out);

inline bool hit(Point point, Injection& out) { return armed.load(std::memory_order_relaxed) && check(point, out); }

// The errno to fail a system call with, or 0.
inline int hit(Point point) {
  Injection injection;
  return hit(point, injection) ? injection.error : 0;
}

// From call number `at` (1 is the next) on, `times` calls are affected.
// Returns false when there is no point of that name.
bool inject(const std::string& point, uint64_t at, uint64_t times, int error, int64_t short_nbytes, bool kill);
// Counts calls without injecting anything, until clear().
void count_only();
void clear();
std::vector<std::pair<std::string, uint64_t>> counts();

}  // namespace fp::fault

#include "prefault.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "align.h"
#include "pool.h"

namespace fp {
namespace {

constexpr uint64_t kWorthwhile = 16u << 20;
constexpr unsigned kMostThreads = 3;
constexpr int kMadvPopulateWrite = 23;  // Linux 5.14; older kernels answer EINVAL

unsigned spare_cpus() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 0;
  return static_cast<unsigned>(std::max(CPU_COUNT(&set) - 1, 0));
}

}  // namespace

bool populate(char* memory, uint64_t nbytes) {
  // The edges may belong to somebody else.
  const uint64_t begin = align_up(reinterpret_cast<uint64_t>(memory), kPage);
  const uint64_t end = align_down(reinterpret_cast<uint64_t>(memory) + nbytes, kPage);
  return begin >= end || ::madvise(reinterpret_cast<void*>(begin), end - begin, kMadvPopulateWrite) == 0;
}

Prefault::Prefault(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
  uint64_t total = 0;
  for (const Range& range : ranges_) total += range.nbytes;
  if (total < kWorthwhile) return;
  const SignalsBlocked blocked;
  for (unsigned i = 0; i < std::min(spare_cpus(), kMostThreads); i++) {
    try {
      threads_.emplace_back([this] { loop(); });
    } catch (const std::system_error&) {
      return;  // the reads touch their memory themselves
    }
  }
}

Prefault::~Prefault() {
  stop_ = true;
  for (auto& thread : threads_) thread.join();
}

void Prefault::loop() {
  while (!stop_.load(std::memory_order_relaxed)) {
    const size_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= ranges_.size()) return;
    const Range& range = ranges_[i];
    if (range.offset < position_.load(std::memory_order_relaxed)) continue;
    if (!populate(range.memory, range.nbytes)) return;
  }
}

}  // namespace fp

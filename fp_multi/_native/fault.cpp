#include "fault.h"

#include <unistd.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <mutex>

namespace fp::fault {
namespace {

constexpr size_t kPoints = static_cast<size_t>(Point::count_);
constexpr std::array<const char*, kPoints> kNames = {
    "open",        "statx",       "fallocate",        "ftruncate",      "fdatasync", "fsync", "sync_file_range",
    "close",       "mkdir",       "rename",           "unlink",         "pwrite",    "pread", "mmap",
    "uring_setup", "uring_enter", "write_completion", "read_completion"};

struct Rule {
  uint64_t first = 0;  // call number, counted from 1; 0: no rule
  uint64_t times = 0;
  Injection injection;
  bool kill = false;
};

std::mutex mutex;
std::array<uint64_t, kPoints> calls{};
std::array<Rule, kPoints> rules{};

}  // namespace

std::atomic<bool> armed{false};

bool check(Point point, Injection& out) {
  const auto i = static_cast<size_t>(point);
  std::lock_guard lock(mutex);
  const uint64_t call = ++calls[i];
  const Rule& rule = rules[i];
  if (rule.first == 0 || call < rule.first || call - rule.first >= rule.times) return false;
  if (rule.kill) {
    ::kill(::getpid(), SIGKILL);
    for (;;) ::pause();  // delivery is not instantaneous; nothing behind this point may run
  }
  out = rule.injection;
  return true;
}

bool inject(const std::string& point, uint64_t at, uint64_t times, int error, int64_t short_nbytes, bool kill) {
  for (size_t i = 0; i < kPoints; i++) {
    if (point != kNames[i]) continue;
    std::lock_guard lock(mutex);
    rules[i] = Rule{calls[i] + at, times, {error, short_nbytes}, kill};
    armed = true;
    return true;
  }
  return false;
}

void count_only() {
  std::lock_guard lock(mutex);
  armed = true;
}

void clear() {
  std::lock_guard lock(mutex);
  armed = false;
  calls.fill(0);
  rules.fill(Rule{});
}

std::vector<std::pair<std::string, uint64_t>> counts() {
  std::lock_guard lock(mutex);
  std::vector<std::pair<std::string, uint64_t>> out;
  for (size_t i = 0; i < kPoints; i++) out.emplace_back(kNames[i], calls[i]);
  return out;
}

}  // namespace fp::fault

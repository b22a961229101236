// A piece of work for the engine's thread, and what others may ask about it meanwhile.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "backend.h"
#include "error.h"
#include "pool.h"

namespace fp {

// What the engine's thread lends to a job while it runs.
class Workshop {
 public:
  virtual ~Workshop() = default;
  virtual Arena& arena() = 0;
  // Memory for sources that must be let go before they are written; kept between jobs like the arena.
  virtual Arena& spill() = 0;
  virtual Pool& pool(unsigned threads) = 0;
  // io_uring or threads, as the options say; null with `error` set if a switched-on capability is
  // missing.
  virtual Backend* backend(const struct IoOptions& options, std::vector<std::string>& reasons, IoError& error) = 0;
  // The backend broke with requests in flight: it and the arena are given up. Memory outside the arena
  // that such requests use is the job's to report (Job::abandoned).
  virtual void discard_backend(Backend* backend) = 0;
};

struct JobStats {
  double open_s = 0, transfer_s = 0, sync_s = 0;
  uint64_t requests = 0, resumed = 0, buffered_nbytes = 0;
  uint64_t copied_nbytes = 0;  // let go at a fence, and written from the copy
  std::string engine;
  bool direct = false;
  std::vector<std::string> reasons;
};

class Job {
 public:
  virtual ~Job() = default;

  // On the engine's thread; must set error() and stats before it returns.
  virtual void run(Workshop& workshop) = 0;
  virtual const std::string& path() const = 0;

  void finish();
  bool done() const { return done_.load(std::memory_order_acquire); }
  // True when done; false when `timeout_s` (negative: none) has passed.
  bool wait(double timeout_s);
  void cancel();
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  uint64_t moved_nbytes() const { return moved_.load(std::memory_order_relaxed); }

  IoError error;   // valid once done
  JobStats stats;  // valid once done
  // Valid once done: the kernel may write to the caller's memory for ever; it must never be freed.
  bool abandoned = false;

 protected:
  std::atomic<uint64_t> moved_{0};  // bytes written or read so far
  std::mutex mutex_;
  std::condition_variable changed_;

 private:
  std::atomic<bool> done_{false};
  std::atomic<bool> cancelled_{false};
};

double monotonic_s();

}  // namespace fp

// A few native threads that share one block of work with their caller: fork, join, nothing queued
// in between.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fp {

class Pool {
 public:
  using Work = std::function<void(uint64_t begin, uint64_t end)>;

  explicit Pool(unsigned threads);  // the caller counts as one
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  unsigned threads() const { return static_cast<unsigned>(workers_.size()) + 1; }
  // Calls work() on parts of [begin, end), cut at multiples of `grain`, and returns when all are
  // done. The parts run at the same time, so work() must not care which thread gets which.
  void run(uint64_t begin, uint64_t end, uint64_t grain, const Work& work);

 private:
  void loop(unsigned index);

  std::mutex mutex_;
  std::condition_variable start_, finished_;
  const Work* work_ = nullptr;
  std::vector<std::pair<uint64_t, uint64_t>> parts_;
  uint64_t round_ = 0;
  unsigned running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

// Blocks every signal in the calling thread and restores the old mask when it goes: threads started
// meanwhile inherit the mask, so that the process's signals go to the threads that expect them.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  unsigned char old_[128];
};

}  // namespace fp

#include "pool.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <system_error>

#include "align.h"

namespace fp {

SignalsBlocked::SignalsBlocked() {
  static_assert(sizeof(old_) >= sizeof(sigset_t));
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  std::memcpy(old_, &old, sizeof(old));
}

SignalsBlocked::~SignalsBlocked() {
  sigset_t old;
  std::memcpy(&old, old_, sizeof(old));
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

Pool::Pool(unsigned threads) {
  const SignalsBlocked blocked;
  parts_.resize(std::max(threads, 1u));
  for (unsigned i = 1; i < threads; i++) {
    try {
      workers_.emplace_back([this, i] { loop(i); });
    } catch (const std::system_error&) {
      return;  // the caller works alone if it must
    }
  }
}

Pool::~Pool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(uint64_t begin, uint64_t end, uint64_t grain, const Work& work) {
  const uint64_t share = align_up((end - begin + threads() - 1) / threads(), grain);
  if (workers_.empty() || end - begin <= grain) return work(begin, end);
  {
    std::lock_guard lock(mutex_);
    uint64_t at = begin;
    for (auto& part : parts_) {
      part = {at, std::min(at + share, end)};
      at = part.second;
    }
    work_ = &work;
    running_ = static_cast<unsigned>(workers_.size());
    round_++;
  }
  start_.notify_all();
  work(parts_[0].first, parts_[0].second);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return running_ == 0; });
  work_ = nullptr;
}

void Pool::loop(unsigned index) {
  uint64_t seen = 0;
  for (;;) {
    const Work* work;
    std::pair<uint64_t, uint64_t> part;
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      work = work_;
      part = parts_[index];
    }
    if (part.first < part.second) (*work)(part.first, part.second);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) finished_.notify_one();
  }
}

}  // namespace fp

#include "threads.h"

#include <system_error>

#include "pool.h"
#include "sys.h"

namespace fp {

Threads::Threads(unsigned threads) {
  const SignalsBlocked blocked;
  for (unsigned i = 0; i < threads; i++) {
    try {
      threads_.emplace_back([this] { loop(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      return;  // fewer will do
    }
  }
}

Threads::~Threads() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (auto& thread : threads_) thread.join();
}

int Threads::submit(const Io& io) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(io);
  }
  work_.notify_one();
  return 0;
}

int Threads::reap(std::vector<Completion>& out, bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) done_.wait(lock, [this] { return !completed_.empty(); });
  out.insert(out.end(), completed_.begin(), completed_.end());
  completed_.clear();
  return 0;
}

void Threads::loop() {
  for (;;) {
    Io io;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;  // stopping, and nothing left to do
      io = queue_.front();
      queue_.pop_front();
    }
    const int64_t result = io.write ? sys::pwrite(io.fd, io.buffer, io.nbytes, io.offset, io.flags)
                                    : sys::pread(io.fd, io.buffer, io.nbytes, io.offset, io.flags);
    {
      std::lock_guard lock(mutex_);
      completed_.push_back({io.token, result});
    }
    done_.notify_one();
  }
}

}  // namespace fp

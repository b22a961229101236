// The backend where io_uring is not to be had: a few threads that call pwrite and pread.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "backend.h"

namespace fp {

class Threads final : public Backend {
 public:
  explicit Threads(unsigned threads);
  ~Threads() override;

  const char* name() const override { return "threads"; }
  unsigned capacity() const override { return 256; }
  int submit(const Io& io) override;
  int reap(std::vector<Completion>& out, bool wait) override;

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Io> queue_;
  std::vector<Completion> completed_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fp

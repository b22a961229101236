#include "engine.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "target_file.h"
#include "threads.h"
#include "uring.h"

namespace fp {
namespace {

constexpr unsigned kRingEntries = 64;  // small: ring memory counts against RLIMIT_MEMLOCK on some kernels
constexpr unsigned kIoThreads = 4;     // enough to saturate a drive with requests of megabytes

class ReleaseJob final : public Job {
 public:
  void run(Workshop& workshop) override { workshop.spill().release(); }
  const std::string& path() const override { return path_; }

 private:
  const std::string path_;
};

}  // namespace

double monotonic_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Job::finish() {
  {
    std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

bool Job::wait(double timeout_s) {
  std::unique_lock lock(mutex_);
  if (timeout_s >= 0)
    return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done(); });
  changed_.wait(lock, [this] { return done(); });
  return true;
}

void Job::cancel() {
  {
    std::lock_guard lock(mutex_);
    cancelled_.store(true, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

// Everything the thread uses. On the heap, so that a forked child can leave it alone: destroying a
// mutex or condition variable that a thread of the parent was using would hang.
struct Engine::State final : Workshop {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> queue;
  bool stop = false;
  std::thread thread;

  // Used by the thread only.
  std::unique_ptr<Uring> uring;
  std::unique_ptr<Threads> threads;
  std::unique_ptr<Pool> helpers;
  Arena memory, let_go;

  Arena& arena() override { return memory; }
  Arena& spill() override { return let_go; }

  Pool& pool(unsigned count) override {
    if (!helpers || helpers->threads() != count) helpers = std::make_unique<Pool>(count);
    return *helpers;
  }

  Backend* backend(const IoOptions& options, std::vector<std::string>& reasons, IoError& error) override {
    if (options.io_uring != Capability::off) {
      if (!uring) uring = std::make_unique<Uring>();
      const char* step = "";
      const int code = uring->usable() ? 0 : uring->open(kRingEntries, step);
      if (!code) return uring.get();
      const std::string why = std::string(step) + ": " + std::strerror(code);
      if (options.io_uring == Capability::on) {
        error.code = code;
        error.op = why;
        error.capability = true;
        return nullptr;
      }
      reasons.push_back("io_uring: " + why);
    }
    if (!threads) threads = std::make_unique<Threads>(kIoThreads);
    return threads.get();
  }

  void discard_backend(Backend* broken) override {
    // Closing the ring does not wait for what is in flight: only memory has to stay.
    if (broken == uring.get()) uring.reset();
    if (broken == threads.get()) threads.release();
    memory.abandon();
    let_go.abandon();
  }

  // What the standard library throws (no thread or no memory to be had) ends the job, not the process.
  void run(Job& job) {
    try {
      job.run(*this);
    } catch (const std::system_error& failure) {
      job.error = {failure.code().value(), "start helper threads", job.path()};
    } catch (const std::bad_alloc&) {
      job.error = {ENOMEM, "allocate", job.path()};
    }
  }

  void loop() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return stop || !queue.empty(); });
        if (queue.empty()) break;
        job = std::move(queue.front());
        queue.pop_front();
      }
      run(*job);
      job->finish();
    }
    // The ring is closed by the thread that used it.
    uring.reset();
    threads.reset();
    helpers.reset();
    memory.release();
    let_go.release();
  }
};

Engine::Engine() : state_(new State), pid_(::getpid()) {
  const SignalsBlocked blocked;
  state_->thread = std::thread([state = state_] { state->loop(); });
}

Engine::~Engine() {
  if (::getpid() != pid_) return;
  close();
  delete state_;
}

bool Engine::usable() const {
  if (::getpid() != pid_) return false;
  std::lock_guard lock(state_->mutex);
  return !state_->stop;
}

bool Engine::submit(std::shared_ptr<Job> job) {
  if (::getpid() != pid_) return false;
  {
    std::lock_guard lock(state_->mutex);
    if (state_->stop) return false;
    state_->queue.push_back(std::move(job));
  }
  state_->changed.notify_one();
  return true;
}

void Engine::release_memory() { submit(std::make_shared<ReleaseJob>()); }

void Engine::close() {
  if (::getpid() != pid_) return;
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->changed.notify_one();
  if (state_->thread.joinable()) state_->thread.join();
}

int probe_io_uring(std::string& step) {
  Uring ring;
  const char* failed = "";
  const int code = ring.open(4, failed);
  step = code ? failed : "";
  return code;
}

}  // namespace fp

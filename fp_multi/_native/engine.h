// The engine: one native thread that owns its ring, its staging memory and its helpers, and runs
// one job after another. It never takes the GIL.
#pragma once
#include <memory>
#include <string>

#include "job.h"

namespace fp {

class Engine {
 public:
  Engine();
  // Finishes what is queued. In a forked child the thread does not exist: everything is leaked
  // there, on purpose.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // False if the engine is closed or belongs to another process.
  bool submit(std::shared_ptr<Job> job);
  // Gives the memory for copies at fences back, once the jobs that are queued now are done.
  void release_memory();
  // Finishes queued jobs, then ends the thread. Idempotent.
  void close();
  bool usable() const;

 private:
  struct State;
  State* state_;
  const int pid_;
};

// 0, or the errno with the step that failed: whether io_uring works in this process.
int probe_io_uring(std::string& step);

}  // namespace fp

// First touch of fresh memory, done ahead of the drive by threads of its own: the kernel has to find and clear the
// pages, which on virtual machines can take longer than reading them full.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace fp {

// Makes the kernel find and clear the whole pages inside the range now. False where it cannot (before Linux 5.14).
bool populate(char* memory, uint64_t nbytes);

class Prefault {
 public:
  // Memory that bytes of the file from `offset` on will be written to.
  struct Range {
    uint64_t offset, nbytes;
    char* memory;
  };
  // Starts touching, in the order given (by offset). Nothing is started where there is too little to gain.
  explicit Prefault(std::vector<Range> ranges);
  ~Prefault();  // stops
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

  // The drive has got to `offset`: what lies before is touched by the reads themselves.
  void advance(uint64_t offset) { position_.store(offset, std::memory_order_relaxed); }

 private:
  void loop();

  const std::vector<Range> ranges_;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> position_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace fp

// io_uring through raw system calls (io_uring_setup(2), io_uring_enter(2)).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "backend.h"

namespace fp {

class Uring final : public Backend {
 public:
  Uring() = default;
  ~Uring() override { close(); }

  // Makes a ring and sends a NOP through it: containers refuse setup, mmap or only enter. 0, or the
  // errno with the step that failed in `step`.
  int open(unsigned entries, const char*& step);
  bool usable() const { return fd_ >= 0; }
  void close();

  const char* name() const override { return "io_uring"; }
  unsigned capacity() const override { return entries_; }
  int submit(const Io& io) override;
  int reap(std::vector<Completion>& out, bool wait) override;

 private:
  int setup(unsigned entries, uint32_t flags);
  int map(const abi::Params& params);
  int enter(unsigned submit, unsigned wait, unsigned flags);
  int push(const abi::Sqe& sqe);
  void drain(std::vector<Completion>& out);

  int fd_ = -1;
  unsigned entries_ = 0;
  void* sq_ring_ = nullptr;
  size_t sq_ring_bytes_ = 0;
  void* cq_ring_ = nullptr;
  size_t cq_ring_bytes_ = 0;
  abi::Sqe* sqes_ = nullptr;
  size_t sqes_bytes_ = 0;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* sq_array_ = nullptr;
  uint32_t sq_mask_ = 0;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  uint32_t cq_mask_ = 0;
  abi::Cqe* cqes_ = nullptr;
};

}  // namespace fp

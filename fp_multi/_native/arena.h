// Memory that the engine and its users allocate in large, aligned pieces.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fp {

// Anonymous memory aligned to `unit` (a power of two, at least a page), given back by the
// destructor.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { release(); }

  // 0 or an errno. Huge pages are asked for when `unit` is the huge page size; a refusal costs
  // speed only.
  int map(size_t nbytes, size_t unit);
  void release();
  // Gives up ownership: the caller unmaps [base, base + length) later.
  void* detach(void*& base, size_t& length);
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* base_ = nullptr;
  size_t length_ = 0;
  char* data_ = nullptr;
  size_t size_ = 0;
};

// The staging blocks of one engine: huge pages, kept between jobs because first touch is dear, and
// not copied by a fork because a copy-on-write break under a running DMA would tear the request.
class Arena {
 public:
  // 0 or an errno. Grows if needed; never shrinks before release().
  int reserve(size_t block_bytes, size_t blocks);
  char* block(size_t index) const { return memory_.data() + index * block_bytes_; }
  size_t block_bytes() const { return block_bytes_; }
  size_t nbytes() const { return memory_.size(); }
  void release() {
    memory_.release();
    touched_ = 0;
  }
  // How far from its start the memory is known to have been used before.
  size_t touched() const { return touched_.load(std::memory_order_relaxed); }
  void set_touched(size_t nbytes) { touched_.store(nbytes, std::memory_order_relaxed); }
  // The most that was needed of it at a time; kUnknown before the first job that might have needed it is over.
  static constexpr size_t kUnknown = ~size_t{0};
  size_t wanted() const { return wanted_.load(std::memory_order_relaxed); }
  void want(size_t nbytes) {
    const size_t before = wanted();
    wanted_.store(before == kUnknown || before < nbytes ? nbytes : before, std::memory_order_relaxed);
  }
  // Leaves the memory mapped for ever: the kernel may still be writing to it.
  void abandon();

 private:
  Mapping memory_;
  size_t block_bytes_ = 0;
  std::atomic<size_t> touched_{0}, wanted_{kUnknown};
};

}  // namespace fp

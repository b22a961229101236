#include "uring.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "fault.h"

namespace fp {
namespace {

uint32_t load_acquire(uint32_t* p) { return std::atomic_ref<uint32_t>(*p).load(std::memory_order_acquire); }
void store_release(uint32_t* p, uint32_t value) {
  std::atomic_ref<uint32_t>(*p).store(value, std::memory_order_release);
}
template <typename T>
T* at(void* base, uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

constexpr uint64_t kProbeToken = ~0ull;

}  // namespace

int Uring::open(unsigned entries, const char*& step) {
  close();
  step = "io_uring_setup";
  // DEFER_TASKRUN (Linux 6.1) keeps completions on this thread; older kernels answer EINVAL.
  int error = setup(entries, abi::kSetupSingleIssuer | abi::kSetupDeferTaskrun);
  if (error == EINVAL) error = setup(entries, 0);
  if (error) return error;
  step = "io_uring_enter";
  abi::Sqe nop{};
  nop.opcode = abi::kOpNop;
  nop.user_data = kProbeToken;
  std::vector<Completion> out;
  error = -push(nop);
  if (!error) error = -reap(out, true);
  if (!error && (out.size() != 1 || out[0].token != kProbeToken || out[0].result != 0)) error = EIO;
  if (error) close();
  return error;
}

int Uring::setup(unsigned entries, uint32_t flags) {
  if (const int error = fault::hit(fault::Point::uring_setup)) return error;
  abi::Params params{};
  params.flags = flags;
  fd_ = static_cast<int>(::syscall(abi::kSysUringSetup, entries, &params));
  if (fd_ < 0) return errno;
  const int error = map(params);
  if (error) close();
  return error;
}

int Uring::map(const abi::Params& p) {
  const auto ring = [this](size_t nbytes, uint64_t offset) {
    void* m =
        ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
    // A forked child that shared the ring could submit into the parent's.
    if (m != MAP_FAILED) ::madvise(m, nbytes, MADV_DONTFORK);
    return m == MAP_FAILED ? nullptr : m;
  };
  sq_ring_bytes_ = p.sq_off.array + p.sq_entries * sizeof(uint32_t);
  cq_ring_bytes_ = p.cq_off.cqes + p.cq_entries * sizeof(abi::Cqe);
  const bool single = p.features & abi::kFeatSingleMmap;
  if (single && cq_ring_bytes_ > sq_ring_bytes_) sq_ring_bytes_ = cq_ring_bytes_;
  if (!(sq_ring_ = ring(sq_ring_bytes_, abi::kOffSqRing))) return errno;
  if (single) {
    cq_ring_ = sq_ring_;
  } else if (!(cq_ring_ = ring(cq_ring_bytes_, abi::kOffCqRing))) {
    return errno;
  }
  sqes_bytes_ = p.sq_entries * sizeof(abi::Sqe);
  sqes_ = static_cast<abi::Sqe*>(ring(sqes_bytes_, abi::kOffSqes));
  if (!sqes_) return errno;
  entries_ = p.sq_entries;
  sq_tail_ = at<uint32_t>(sq_ring_, p.sq_off.tail);
  sq_mask_ = *at<uint32_t>(sq_ring_, p.sq_off.ring_mask);
  sq_array_ = at<uint32_t>(sq_ring_, p.sq_off.array);
  cq_head_ = at<uint32_t>(cq_ring_, p.cq_off.head);
  cq_tail_ = at<uint32_t>(cq_ring_, p.cq_off.tail);
  cq_mask_ = *at<uint32_t>(cq_ring_, p.cq_off.ring_mask);
  cqes_ = at<abi::Cqe>(cq_ring_, p.cq_off.cqes);
  return 0;
}

void Uring::close() {
  if (sqes_) ::munmap(sqes_, sqes_bytes_);
  if (cq_ring_ && cq_ring_ != sq_ring_) ::munmap(cq_ring_, cq_ring_bytes_);
  if (sq_ring_) ::munmap(sq_ring_, sq_ring_bytes_);
  if (fd_ >= 0) ::close(fd_);
  sqes_ = nullptr;
  sq_ring_ = cq_ring_ = nullptr;
  fd_ = -1;
}

int Uring::enter(unsigned submit, unsigned wait, unsigned flags) {
  if (const int error = fault::hit(fault::Point::uring_enter)) return -error;
  const long n = ::syscall(abi::kSysUringEnter, fd_, submit, wait, flags, nullptr, 0);
  return n < 0 ? -errno : static_cast<int>(n);
}

int Uring::push(const abi::Sqe& sqe) {
  const uint32_t tail = *sq_tail_;  // only this thread writes it
  sqes_[tail & sq_mask_] = sqe;
  sq_array_[tail & sq_mask_] = tail & sq_mask_;
  // The kernel reads the entry once it sees the new tail: the stores above must be visible first.
  store_release(sq_tail_, tail + 1);
  for (;;) {
    const int n = enter(1, 0, 0);
    if (n == 1) return 0;
    if (n == -EINTR) continue;
    // Not taken. The tail goes back so that a later call does not submit this entry a second time.
    store_release(sq_tail_, tail);
    return n == 0 ? -EAGAIN : n;
  }
}

int Uring::submit(const Io& io) {
  abi::Sqe sqe{};
  sqe.opcode = io.write ? abi::kOpWrite : abi::kOpRead;
  sqe.fd = io.fd;
  sqe.addr = reinterpret_cast<uint64_t>(io.buffer);
  sqe.len = io.nbytes;
  sqe.off = io.offset;
  sqe.rw_flags = static_cast<uint32_t>(io.flags);
  sqe.user_data = io.token;
  return push(sqe);
}

void Uring::drain(std::vector<Completion>& out) {
  uint32_t head = *cq_head_;
  const uint32_t tail = load_acquire(cq_tail_);  // pairs with the kernel's release: entries before it are complete
  for (; head != tail; head++) {
    const abi::Cqe& cqe = cqes_[head & cq_mask_];
    out.push_back({cqe.user_data, cqe.res});
  }
  store_release(cq_head_, head);  // after the copies: the kernel may reuse the entries now
}

int Uring::reap(std::vector<Completion>& out, bool wait) {
  const size_t before = out.size();
  for (;;) {
    // With DEFER_TASKRUN completions are posted only inside enter(GETEVENTS), so even a look costs
    // a call.
    const int n = enter(0, wait ? 1 : 0, abi::kEnterGetevents);
    if (n < 0 && n != -EINTR && n != -EAGAIN && n != -EBUSY) return n;
    drain(out);
    if (!wait || out.size() > before) return 0;
    if (n == -EAGAIN || n == -EBUSY) ::sched_yield();
  }
}

}  // namespace fp

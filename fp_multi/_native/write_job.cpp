#include "write_job.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "align.h"
#include "prefault.h"

namespace fp {
namespace {

constexpr uint64_t kFillGrain = 256 << 10;  // smallest share of a block that is worth another thread

constexpr uint64_t kSpillStep = 8u << 20;  // copied at a fence between two looks at the drive

// A thread that ends, whatever happens, before what it works on does.
struct Companion {
  std::atomic<bool>& stop;
  std::thread thread{};
  void end() {
    stop = true;
    if (thread.joinable()) thread.join();
  }
  ~Companion() { end(); }
};

}  // namespace

bool WriteJob::wait_staged(uint64_t nbytes, double timeout_s) {
  std::unique_lock lock(mutex_);
  const auto reached = [&] {
    if (done() || staged_nbytes() >= nbytes) return true;
    wake_at_ = std::min(wake_at_, nbytes);
    return false;
  };
  if (timeout_s >= 0) return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), reached);
  changed_.wait(lock, reached);
  return true;
}

void WriteJob::set_ready_nbytes(uint64_t nbytes) {
  {
    std::lock_guard lock(mutex_);
    ready_.store(nbytes, std::memory_order_release);
  }
  changed_.notify_all();
}

bool WriteJob::wait_ready(uint64_t nbytes, bool block) {
  if (ready_.load(std::memory_order_acquire) >= nbytes) return true;
  if (!block) return false;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return cancelled() || ready_.load() >= nbytes; });
  return !cancelled();
}

void WriteJob::run(Workshop& workshop) {
  TargetFile file(path_, options_);
  const double begin = monotonic_s();
  Backend* backend = workshop.backend(options_, stats.reasons, error);
  if (!backend) return;
  stats.engine = backend->name();
  error = open(file);
  const double opened = monotonic_s();
  stats.open_s = opened - begin;
  if (!error) transfer(workshop, *backend, file);
  const double written = monotonic_s();
  stats.transfer_s = written - opened;
  if (!error) error = flush(file);
  const IoError closed = file.close();
  if (!error) error = closed;
  stats.sync_s = monotonic_s() - written;
  stats.reasons.insert(stats.reasons.end(), file.reasons.begin(), file.reasons.end());
}

IoError WriteJob::open(TargetFile& file) {
  if (IoError failure = file.open_write(options_.reuse, options_.mode)) return failure;
  const int allocated = sys::fallocate(file.buffered_fd(), source_->nbytes());
  if (allocated == -EOPNOTSUPP || allocated == -ENOSYS || allocated == -EINVAL) {
    file.reasons.emplace_back("preallocation: not supported by the file system");
  } else if (allocated < 0) {
    return file.error(-allocated, "fallocate", 0, source_->nbytes());
  }
  if (IoError failure = file.choose_direct(true)) return failure;
  stats.direct = file.direct();
  return {};
}

void WriteJob::fence(uint64_t spill_nbytes) {
  {
    std::lock_guard lock(mutex_);
    // Never more than was announced: memory that is being touched does not move.
    const uint64_t most = options_.spill_nbytes ? options_.spill_nbytes : spill_nbytes;
    spill_limit_.store(std::min(spill_nbytes, most), std::memory_order_release);
  }
  changed_.notify_all();
}

void WriteJob::set_staged(uint64_t nbytes) {
  bool wake;
  {
    std::lock_guard lock(mutex_);
    staged_.store(nbytes, std::memory_order_release);
    wake = nbytes >= wake_at_;
    if (wake) wake_at_ = ~uint64_t{0};
  }
  if (wake) changed_.notify_all();
}

void WriteJob::touch_spill(Arena& spill) {
  const uint64_t most = std::min({options_.spill_nbytes, source_->nbytes(), uint64_t{spill.wanted()}});
  // The drive takes away from one end what this adds at the other: where both meet nothing more is needed.
  while (!written_.load(std::memory_order_relaxed)) {
    const uint64_t begin = spill.touched(), end = std::min(begin + kSpillStep, most);
    if (begin >= std::min(most, source_->nbytes() - staged_nbytes())) return;
    if (!populate(spill.block(0) + begin, end - begin)) return;
    spill.set_touched(end);
  }
}

bool WriteJob::let_go(Workshop& workshop, Pool& pool) {
  const uint64_t total = source_->nbytes(), staged = staged_nbytes();
  const uint64_t limit = spill_limit_.load(std::memory_order_acquire);
  if (staged == total || (spill_begin_ > staged && total - staged > limit)) return false;
  Arena& spill = workshop.spill();
  if (spill_begin_ > staged) {
    // Sources that are still on their way from a device are nobody's to change.
    if (ready_.load(std::memory_order_acquire) < total) return false;
    // No memory: then the fence waits for the drive instead, which is slower and just as right.
    if (spill.reserve(kHugePage, align_up(total - staged, kHugePage) / kHugePage) != 0) {
      spill_limit_.store(0, std::memory_order_relaxed);
      return false;
    }
    spill_begin_ = staged;
    spill.want(total - staged);
  }
  const uint64_t end = std::min(staged + kSpillStep, total);
  char* to = spill.block(0) + (staged - spill_begin_);
  pool.run(staged, end, kFillGrain, [&](uint64_t a, uint64_t b) { source_->fill(a, b, to + (a - staged)); });
  stats.copied_nbytes += end - staged;
  set_staged(end);
  return true;
}

void WriteJob::send(Transfer& transfer, TargetFile& file, uint64_t tag, char* data, uint64_t begin, uint64_t end) {
  // Direct requests are whole pages; what remains of the last block goes through the buffered descriptor.
  const uint64_t direct_end = file.direct() ? align_down(end, kPage) : end;
  if (direct_end > begin) transfer.start(tag, data, begin, direct_end - begin, direct_end - begin);
  if (direct_end < end && !transfer.error())
    transfer.fail(write_tail(file, data + (direct_end - begin), direct_end, end - direct_end));
}

void WriteJob::transfer(Workshop& workshop, Backend& backend, TargetFile& file) {
  const uint64_t total = source_->nbytes(), block_bytes = options_.block_bytes;
  Transfer transfer(backend, file, true, options_.depth);
  // One block more than requests: it is filled while all others are on their way.
  const auto blocks =
      static_cast<uint32_t>(std::min<uint64_t>(options_.depth + 1, align_up(total, block_bytes) / block_bytes));
  if (const int code = workshop.arena().reserve(block_bytes, std::max(blocks, 1u))) {
    error = file.error(code, "staging memory", 0, block_bytes * blocks);
    return;
  }
  Pool& pool = workshop.pool(options_.copy_threads);
  std::vector<uint64_t> free, finished;
  for (uint32_t i = blocks; i-- > 0;) free.push_back(i);
  const auto settle = [&](bool wait) {
    finished.clear();
    transfer.reap(finished, wait);
    for (const uint64_t tag : finished)
      if (tag < blocks) free.push_back(tag);
    moved_.store(stats.buffered_nbytes + transfer.moved_nbytes(), std::memory_order_relaxed);
  };

  Arena& spill = workshop.spill();
  const uint64_t spill_nbytes = std::min(options_.spill_nbytes, total);
  Companion toucher{written_};
  if (spill_nbytes && spill.reserve(kHugePage, align_up(spill_nbytes, kHugePage) / kHugePage) == 0 &&
      spill.touched() < spill_nbytes) {
    const SignalsBlocked blocked;
    try {
      toucher.thread = std::thread([this, &spill] { touch_spill(spill); });
    } catch (const std::system_error&) {
      // The copy touches the memory itself.
    }
  }
  uint64_t next = 0;  // sent to the drive, or on its way
  while (next < total && !transfer.error()) {
    if (cancelled()) {
      transfer.fail(file.error(ECANCELED, "write"));
      break;
    }
    const uint64_t end = std::min(next + block_bytes, total);
    // A fence comes before the drive: somebody waits for the sources. The drive is kept busy from the copy meanwhile.
    const bool copied = let_go(workshop, pool);
    if (end <= staged_nbytes() && spill_begin_ <= next) {
      if (!transfer.full()) {
        send(transfer, file, blocks, workshop.spill().block(0) + (next - spill_begin_), next, end);
        next = end;
      } else if (!copied) {
        settle(true);
      }
      settle(false);
      continue;
    }
    if (copied) continue;
    if (free.empty() || transfer.full() || !wait_ready(end, transfer.idle())) {
      settle(true);
      continue;
    }
    const uint64_t block = free.back();
    free.pop_back();
    char* to = workshop.arena().block(block);
    pool.run(next, end, kFillGrain, [&](uint64_t a, uint64_t b) { source_->fill(a, b, to + (a - next)); });
    set_staged(end);
    send(transfer, file, block, to, next, end);
    next = end;
    settle(false);
  }
  toucher.end();
  if (spill_nbytes) spill.want(0);
  while (!transfer.idle() && !transfer.broken()) settle(true);
  if (transfer.broken()) workshop.discard_backend(&backend);
  error = transfer.error();
  stats.requests = transfer.requests();
  stats.resumed = transfer.resumed();
  stats.direct = file.direct();
}

IoError WriteJob::write_tail(TargetFile& file, const char* data, uint64_t offset, uint64_t nbytes) {
  while (nbytes) {
    const int64_t n = sys::pwrite(file.buffered_fd(), data, nbytes, offset, 0);
    if (n <= 0) return file.error(n < 0 ? static_cast<int>(-n) : EIO, "write", offset, nbytes);
    data += n;
    offset += static_cast<uint64_t>(n);
    nbytes -= static_cast<uint64_t>(n);
    stats.buffered_nbytes += static_cast<uint64_t>(n);
  }
  return {};
}

IoError WriteJob::flush(TargetFile& file) {
  const uint64_t total = source_->nbytes();
  const int64_t size = sys::file_size(file.buffered_fd());
  if (size < 0) return file.error(static_cast<int>(-size), "fstat");
  if (static_cast<uint64_t>(size) != total) {  // a reused file that was longer
    if (const int result = sys::ftruncate(file.buffered_fd(), total); result < 0)
      return file.error(-result, "ftruncate", total);
  }
  if (!options_.durable) return {};
  // Direct writes are in the drive, perhaps in its volatile cache; sizes and extents are only in
  // memory.
  if (const int result = sys::fdatasync(file.buffered_fd()); result < 0)
    return file.error(-result, "fdatasync", 0, total);
  return {};
}

}  // namespace fp

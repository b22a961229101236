// Writes one file from a Source: allocate, stage, write, flush.
#pragma once
#include <memory>
#include <string>

#include "job.h"
#include "source.h"
#include "target_file.h"
#include "transfer.h"

namespace fp {

struct WriteOptions : IoOptions {
  bool reuse = false;   // overwrite an existing file in place and cut it to length
  bool durable = true;  // fdatasync
  // A fence may come, and copy at most so much: memory for it is touched ahead, as far as it may still be needed.
  uint64_t spill_nbytes = 0;
  unsigned mode = 0666;  // before the umask
};

class WriteJob final : public Job {
 public:
  WriteJob(std::string path, std::unique_ptr<Source> source, const WriteOptions& options)
      : path_(std::move(path)), source_(std::move(source)), options_(options) {}

  void run(Workshop& workshop) override;
  const std::string& path() const override { return path_; }

  size_t chunks() const { return source_->chunks(); }
  uint32_t crc(size_t chunk) const { return source_->crc(chunk); }
  // Bytes of the file, from its start, whose sources have been read: that memory may change again.
  uint64_t staged_nbytes() const { return staged_.load(std::memory_order_acquire); }
  // Waits until staged_nbytes() >= nbytes or the job is done. False on timeout (negative: none).
  bool wait_staged(uint64_t nbytes, double timeout_s);
  // The sources' owner wants to change them: what has not been read yet is copied at memory speed, and written from
  // the copy. At most `spill_nbytes` are copied; while more than that is left, sources are read as fast as they are
  // written. wait_staged(nbytes of the file) tells when all is copied.
  void fence(uint64_t spill_nbytes);
  // Sources at and behind `nbytes` are not ready to be read yet (device copies on their way). Only
  // grows; starts as "everything is ready".
  void set_ready_nbytes(uint64_t nbytes);

 private:
  IoError open(TargetFile& file);
  void transfer(Workshop& workshop, Backend& backend, TargetFile& file);
  // Runs beside the write, in a thread of its own, until memory for all that a fence may still copy has been touched:
  // as much as fences of earlier jobs copied, or, in the first job, as much as is not written yet.
  void touch_spill(Arena& spill);
  // Copies the next part of what is to be let go; false if there is nothing (more) to copy now.
  bool let_go(Workshop& workshop, Pool& pool);
  void send(Transfer& transfer, TargetFile& file, uint64_t tag, char* data, uint64_t begin, uint64_t end);
  void set_staged(uint64_t nbytes);
  IoError write_tail(TargetFile& file, const char* data, uint64_t offset, uint64_t nbytes);
  IoError flush(TargetFile& file);
  bool wait_ready(uint64_t nbytes, bool block);

  const std::string path_;
  const std::unique_ptr<Source> source_;
  const WriteOptions options_;
  std::atomic<uint64_t> staged_{0};
  // The nearest mark that somebody waits for: not every block wakes a thread. Guarded by mutex_.
  uint64_t wake_at_ = ~uint64_t{0};
  std::atomic<uint64_t> spill_limit_{0};
  std::atomic<bool> written_{false};
  // [spill_begin_, staged_) is in the spill memory, which ends with the file. Used by the engine's thread only.
  uint64_t spill_begin_ = ~0ull;
  std::atomic<uint64_t> ready_{~0ull};
};

}  // namespace fp

// One file with two descriptors: a buffered one, and a direct one where the file system really is
// direct.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"
#include "sys.h"

namespace fp {

enum class Capability : uint8_t { off = 0, on = 1, automatic = 2 };

struct IoOptions {
  uint64_t block_bytes = 8u << 20;
  unsigned depth = 4;
  unsigned copy_threads = 1;
  Capability io_uring = Capability::automatic;
  Capability direct = Capability::automatic;
  Capability dontcache = Capability::automatic;
};

class TargetFile {
 public:
  TargetFile(std::string path, const IoOptions& options) : path_(std::move(path)), options_(options) {}

  // `reuse`: overwrite what is there (a retired checkpoint's file) instead of insisting on a new
  // file.
  IoError open_write(bool reuse, unsigned mode);
  IoError open_read();
  // Decides whether requests go direct. For writing, call after the space is allocated: where the
  // file system does not say what it supports, a misaligned write to the file's own first bytes
  // tells.
  IoError choose_direct(bool writing);
  // Reads through the page cache, whose pages are wanted where they are. Call before
  // choose_direct().
  void stay_in_cache(const char* reason) {
    options_.direct = Capability::off;
    if (options_.dontcache == Capability::automatic) options_.dontcache = Capability::off;
    reasons.emplace_back(reason);
  }
  // Closes both; the first failure counts.
  IoError close();

  IoError error(int code, const char* op, uint64_t offset = 0, uint64_t nbytes = 0) const {
    return {code, op, path_, offset, nbytes, false};
  }
  int buffered_fd() const { return buffered_.get(); }
  bool direct() const { return use_direct_; }
  int fd() const { return use_direct_ ? direct_.get() : buffered_.get(); }
  int flags() const { return use_direct_ ? 0 : buffered_flags_; }

  // A buffered write is complete. Without RWF_DONTCACHE the kernel would leave its pages until fdatasync, and the
  // drive idle until then.
  void written_to_cache(uint64_t offset, uint64_t nbytes) const {
    sys::start_writeback(buffered_.get(), offset, nbytes);
  }

  // A direct or RWF_DONTCACHE request was refused as such. True if the file now goes on without;
  // false if the capability is switched on, and the refusal is an error.
  bool retreat_from_direct(int code);
  bool retreat_from_dontcache(int code);

  std::vector<std::string> reasons;  // why an automatic capability is not used

 private:
  IoError no_direct(const std::string& why, int code);

  std::string path_;
  IoOptions options_;
  sys::Fd buffered_, direct_;
  bool use_direct_ = false;
  int buffered_flags_ = 0;
};

}  // namespace fp

// System calls with a fault point in front of each. Results are the call's value, or -errno.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace fp::sys {

int open(const std::string& path, int flags, unsigned mode = 0644);
int close(int fd);
int fallocate(int fd, uint64_t nbytes);
int ftruncate(int fd, uint64_t nbytes);
int fdatasync(int fd);
int fsync(int fd);
int64_t pwrite(int fd, const char* buf, size_t nbytes, uint64_t offset, int flags);
int64_t pread(int fd, char* buf, size_t nbytes, uint64_t offset, int flags);
int64_t file_size(int fd);

// Durability and naming steps of the commit, done here so that they have fault points and run
// without the GIL.
int fsync_path(const std::string& path);  // a file or a directory
// Makes a file, which must not exist, of these bytes, through the page cache. `step` names the call that failed.
int write_file(const std::string& path, const char* data, size_t nbytes, bool durable, const char*& step);
int mkdir(const std::string& path, unsigned mode);
int unlink(const std::string& path);
// mode 0: plain rename; 1: fail if the target exists (RENAME_NOREPLACE); 2: swap both
// (RENAME_EXCHANGE).
int rename(const std::string& from, const std::string& to, unsigned mode);

// Direct I/O alignment from statx(STATX_DIOALIGN).
enum class Dio { unknown, unsupported, supported };
Dio dio_alignment(int fd, uint32_t& mem_align, uint32_t& offset_align);

// Whether other hosts may have the file system, too, whose locks are not ours: NFS, SMB, Lustre, Ceph, FUSE and the
// like.
bool on_network(const std::string& path);

// Whether the file's blocks are overwritten in place and have no checksums (btrfs: `chattr +C`, `nodatacow`).
bool no_cow(int fd);

// Sends the range's dirty pages on their way to the drive, without waiting for them. What fails is reported by
// fdatasync().
void start_writeback(int fd, uint64_t offset, uint64_t nbytes);

// Share of the range's pages that is in the page cache, 0 to 1; negative where the kernel cannot
// tell.
double cached_share(int fd, uint64_t offset, uint64_t nbytes);

// Anonymous private memory; nullptr with errno set on failure.
void* map_memory(size_t nbytes);
void unmap_memory(void* address, size_t nbytes);

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void adopt(int fd) {
    reset();
    fd_ = fd;
  }
  // Closes now; -errno if close reports an error (network file systems do).
  int reset() {
    const int fd = fd_;
    fd_ = -1;
    return fd >= 0 ? close(fd) : 0;
  }

 private:
  int fd_ = -1;
};

}  // namespace fp::sys

#include "sys.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>

#include "abi.h"
#include "align.h"
#include "fault.h"

namespace fp::sys {
namespace {

using fault::Point;

template <typename Call>
auto retry_interrupted(Call call) -> decltype(call()) {
  for (;;) {
    const auto result = call();
    if (result >= 0) return result;
    if (errno != EINTR) return static_cast<decltype(call())>(-errno);
  }
}

}  // namespace

int open(const std::string& path, int flags, unsigned mode) {
  if (const int error = fault::hit(Point::open)) return -error;
  return retry_interrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); });
}

int close(int fd) {
  const int injected = fault::hit(Point::close);
  // Never retried: on Linux the descriptor is gone whatever close says.
  const int result = ::close(fd) == 0 ? 0 : -errno;
  if (injected) return -injected;
  return result == -EINTR ? 0 : result;
}

int fallocate(int fd, uint64_t nbytes) {
  if (const int error = fault::hit(Point::fallocate)) return -error;
  if (nbytes == 0) return 0;
  // Mode 0 extends the size too: with KEEP_SIZE or ftruncate every direct write would be an
  // extending one, which the file system serialises.
  return retry_interrupted([&] { return ::fallocate(fd, 0, 0, static_cast<off_t>(nbytes)); });
}

int ftruncate(int fd, uint64_t nbytes) {
  if (const int error = fault::hit(Point::ftruncate)) return -error;
  return retry_interrupted([&] { return ::ftruncate(fd, static_cast<off_t>(nbytes)); });
}

int fdatasync(int fd) {
  if (const int error = fault::hit(Point::fdatasync)) return -error;
  // Never retried: after a failure the kernel may have dropped the dirty pages, and a second call
  // would lie.
  return ::fdatasync(fd) == 0 ? 0 : -errno;
}

int fsync(int fd) {
  if (const int error = fault::hit(Point::fsync)) return -error;
  return ::fsync(fd) == 0 ? 0 : -errno;
}

int64_t pwrite(int fd, const char* buf, size_t nbytes, uint64_t offset, int flags) {
  if (const int error = fault::hit(Point::pwrite)) return -error;
  const iovec vec{const_cast<char*>(buf), nbytes};
  return retry_interrupted([&]() -> int64_t {
    return flags ? ::pwritev2(fd, &vec, 1, static_cast<off_t>(offset), flags)
                 : ::pwrite(fd, buf, nbytes, static_cast<off_t>(offset));
  });
}

int64_t pread(int fd, char* buf, size_t nbytes, uint64_t offset, int flags) {
  if (const int error = fault::hit(Point::pread)) return -error;
  const iovec vec{buf, nbytes};
  return retry_interrupted([&]() -> int64_t {
    return flags ? ::preadv2(fd, &vec, 1, static_cast<off_t>(offset), flags)
                 : ::pread(fd, buf, nbytes, static_cast<off_t>(offset));
  });
}

int64_t file_size(int fd) {
  struct stat st{};
  return ::fstat(fd, &st) == 0 ? static_cast<int64_t>(st.st_size) : -errno;
}

int fsync_path(const std::string& path) {
  const int fd = open(path, O_RDONLY);
  if (fd < 0) return fd;
  const int synced = fsync(fd);
  const int closed = close(fd);
  return synced < 0 ? synced : closed;
}

int write_file(const std::string& path, const char* data, size_t nbytes, bool durable, const char*& step) {
  step = "open";
  Fd fd(open(path, O_WRONLY | O_CREAT | O_EXCL));
  if (!fd.valid()) return fd.get();
  step = "write";
  for (uint64_t at = 0; at < nbytes;) {
    const int64_t n = pwrite(fd.get(), data + at, nbytes - at, at, 0);
    if (n <= 0) return n < 0 ? static_cast<int>(n) : -EIO;
    at += static_cast<uint64_t>(n);
  }
  step = "fdatasync";
  if (const int synced = durable ? fdatasync(fd.get()) : 0; synced < 0) return synced;
  step = "close";
  return fd.reset();
}

int mkdir(const std::string& path, unsigned mode) {
  if (const int error = fault::hit(Point::mkdir)) return -error;
  return ::mkdir(path.c_str(), mode) == 0 ? 0 : -errno;
}

int unlink(const std::string& path) {
  if (const int error = fault::hit(Point::unlink)) return -error;
  return ::unlink(path.c_str()) == 0 ? 0 : -errno;
}

int rename(const std::string& from, const std::string& to, unsigned mode) {
  if (const int error = fault::hit(Point::rename)) return -error;
  if (mode == 0) return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : -errno;
  return ::syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), mode) == 0 ? 0 : -errno;
}

Dio dio_alignment(int fd, uint32_t& mem_align, uint32_t& offset_align) {
  if (fault::hit(Point::statx)) return Dio::unknown;
  abi::Statx st{};
  if (::syscall(SYS_statx, fd, "", abi::kAtEmptyPath, abi::kStatxDioalign, &st) != 0) return Dio::unknown;
  if (!(st.mask & abi::kStatxDioalign)) return Dio::unknown;
  mem_align = st.dio_mem_align;
  offset_align = st.dio_offset_align;
  return offset_align ? Dio::supported : Dio::unsupported;
}

bool on_network(const std::string& path) {
  // From the kernel's list of file systems (statfs(2)), and of those that live outside of it.
  static constexpr uint32_t kKinds[] = {
      0x6969,      // NFS
      0x517B,      // SMB
      0xFE534D42,  // SMB 2
      0xFF534D42,  // CIFS
      0x0BD00BD0,  // Lustre
      0x00C36400,  // Ceph
      0x47504653,  // GPFS
      0x19830326,  // BeeGFS
      0xAAD7AAEA,  // PanFS
      0x65735546,  // FUSE: whoever is behind it
      0x01021997,  // 9p
      0x5346414F,  // AFS
  };
  struct statfs st{};
  if (::statfs(path.c_str(), &st) != 0) return false;
  return std::find(std::begin(kKinds), std::end(kKinds), static_cast<uint32_t>(st.f_type)) != std::end(kKinds);
}

bool no_cow(int fd) {
  int flags = 0;  // the kernel writes an int, whatever the size in the request's number says
  return ::ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_NOCOW_FL);
}

void start_writeback(int fd, uint64_t offset, uint64_t nbytes) {
  if (fault::hit(Point::sync_file_range)) return;
  ::sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes), SYNC_FILE_RANGE_WRITE);
}

double cached_share(int fd, uint64_t offset, uint64_t nbytes) {
  struct {
    uint64_t off, len;
  } range{offset, nbytes};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } stat{};
  if (nbytes == 0 || ::syscall(abi::kSysCachestat, fd, &range, &stat, 0) != 0) return -1;
  const uint64_t pages = align_up(nbytes, kPage) / kPage;
  return static_cast<double>(stat.cached) / static_cast<double>(pages);
}

void* map_memory(size_t nbytes) {
  if (const int error = fault::hit(Point::mmap)) {
    errno = error;
    return nullptr;
  }
  void* address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void unmap_memory(void* address, size_t nbytes) { ::munmap(address, nbytes); }

}  // namespace fp::sys

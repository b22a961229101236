#include "target_file.h"

#include <fcntl.h>

#include <cstring>

#include "abi.h"
#include "align.h"

namespace fp {

IoError TargetFile::open_write(bool reuse, unsigned mode) {
  const int fd = sys::open(path_, O_RDWR | O_CREAT | (reuse ? 0 : O_EXCL), mode);
  if (fd < 0) return error(-fd, "open");
  buffered_.adopt(fd);
  return {};
}

IoError TargetFile::open_read() {
  const int fd = sys::open(path_, O_RDONLY);
  if (fd < 0) return error(-fd, "open");
  buffered_.adopt(fd);
  return {};
}

IoError TargetFile::no_direct(const std::string& why, int code) {
  direct_.reset();
  use_direct_ = false;
  if (options_.direct == Capability::on) {
    IoError failure = error(code, "open(O_DIRECT)");
    failure.capability = true;
    failure.op = "O_DIRECT: " + why;
    return failure;
  }
  if (options_.direct == Capability::automatic) reasons.push_back("direct: " + why);
  return {};
}

IoError TargetFile::choose_direct(bool writing) {
  buffered_flags_ = options_.dontcache == Capability::off ? 0 : abi::kRwfDontcache;
  if (options_.direct == Capability::off) return {};
  if (options_.direct == Capability::automatic && options_.dontcache == Capability::on)
    return no_direct("RWF_DONTCACHE is switched on", 0);
  const int fd = sys::open(path_, (writing ? O_WRONLY : O_RDONLY) | O_DIRECT);
  if (fd < 0) return no_direct(std::string("open: ") + std::strerror(-fd), -fd);
  direct_.adopt(fd);
  uint32_t mem_align = 0, offset_align = 0;
  switch (sys::dio_alignment(fd, mem_align, offset_align)) {
    case sys::Dio::unsupported:
      return no_direct("the file system says it has none", EOPNOTSUPP);
    case sys::Dio::supported:
      if (offset_align > kPage || mem_align > kPage) return no_direct("needs alignment above 4096", EINVAL);
      break;
    case sys::Dio::unknown:
      // btrfs with checksums, tmpfs, FUSE and others take the flag and buffer in silence; they also
      // take misaligned requests, which real direct I/O refuses. btrfs without checksums takes those, too (it
      // buffers just them), but is direct for aligned ones.
      if (sys::no_cow(fd)) break;
      if (writing && sys::file_size(buffered_.get()) >= 3) {
        const char probe[4] = {};
        if (sys::pwrite(fd, probe + 1, 3, 0, 0) == 3)
          return no_direct("the file system buffers direct writes", EOPNOTSUPP);
      } else if (!writing) {
        char probe[4];
        if (sys::pread(fd, probe + 1, 3, 0, 0) == 3)
          return no_direct("the file system buffers direct reads", EOPNOTSUPP);
      }
      break;
  }
  use_direct_ = true;
  return {};
}

bool TargetFile::retreat_from_direct(int code) {
  if (options_.direct != Capability::automatic) return false;
  if (use_direct_) reasons.push_back(std::string("direct: request refused: ") + std::strerror(code));
  // direct_ stays open: other requests on it may be in flight.
  use_direct_ = false;
  return true;
}

bool TargetFile::retreat_from_dontcache(int code) {
  if (options_.dontcache == Capability::on) return false;
  if (buffered_flags_) reasons.push_back(std::string("dontcache: ") + std::strerror(code));
  buffered_flags_ = 0;
  return true;
}

IoError TargetFile::close() {
  const int direct = direct_.reset();
  const int buffered = buffered_.reset();
  if (direct < 0) return error(-direct, "close");
  if (buffered < 0) return error(-buffered, "close");
  return {};
}

}  // namespace fp

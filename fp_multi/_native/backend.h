// What carries out requests: submit some, reap some. One thread uses a backend.
#pragma once
#include <cstdint>
#include <vector>

namespace fp {

struct Io {
  int fd = -1;
  bool write = false;
  char* buffer = nullptr;
  uint32_t nbytes = 0;
  uint64_t offset = 0;
  int flags = 0;  // RWF_*
  uint64_t token = 0;
};

struct Completion {
  uint64_t token = 0;
  int64_t result = 0;  // bytes, or -errno
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual unsigned capacity() const = 0;  // requests in flight at most
  // 0 or -errno; the request was not taken then. The caller keeps the buffer until its completion.
  virtual int submit(const Io& io) = 0;
  // Appends what has completed; waits for one if `wait`. 0 or -errno: the backend is unusable then.
  virtual int reap(std::vector<Completion>& out, bool wait) = 0;
};

}  // namespace fp

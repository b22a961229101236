// The one loop that moves bytes: submit up to a depth, reap, look at every result, resume what came
// back short.
#pragma once
#include <cstdint>
#include <vector>

#include "backend.h"
#include "error.h"
#include "target_file.h"

namespace fp {

class Transfer {
 public:
  Transfer(Backend& backend, TargetFile& file, bool writing, unsigned depth);
  // Waits for what is in flight (there is something only if an exception is passing): its memory is
  // free again behind this.
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  bool full() const { return free_.empty(); }
  bool idle() const { return free_.size() == requests_.size(); }
  // Starts a request. `need` <= `nbytes` is what must be moved: a direct read may reach over the
  // end of the file. `tag` comes back when it is done. Only if not full(); after an error nothing
  // is started.
  void start(uint64_t tag, char* buffer, uint64_t offset, uint64_t nbytes, uint64_t need);
  // Handles completions, waiting for at least one if `wait` and any is in flight. Appends the tags
  // of requests that are complete. Requests that failed are dropped, and the first failure is kept
  // in error().
  void reap(std::vector<uint64_t>& finished, bool wait);
  void fail(IoError error) {
    if (!error_) error_ = std::move(error);
  }
  const IoError& error() const { return error_; }
  uint64_t moved_nbytes() const { return moved_; }  // by finished requests
  uint64_t requests() const { return submitted_; }
  uint64_t resumed() const { return resumed_; }
  // The backend failed as such; requests may be in flight for ever, and the kernel may still use
  // their buffers.
  bool broken() const { return broken_; }

 private:
  struct Request {
    uint64_t tag = 0;
    char* buffer = nullptr;
    uint64_t offset = 0, nbytes = 0, need = 0, done = 0;
    int fd = -1, flags = 0;
    bool direct = false;
    unsigned idle_tries = 0;  // since the last byte of progress
  };

  void send(uint32_t slot);
  // True when the request is complete.
  bool handle(uint32_t slot, int64_t result);
  void use_current_descriptor(Request& request);
  void fail_request(const Request& request, int code);

  Backend& backend_;
  TargetFile& file_;
  const bool writing_;
  std::vector<Request> requests_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> waiting_;  // to be sent again, once something has completed
  std::vector<Completion> completions_;
  unsigned in_flight_ = 0;  // at the backend
  uint64_t submitted_ = 0, resumed_ = 0, moved_ = 0;
  bool broken_ = false;
  IoError error_;
};

}  // namespace fp

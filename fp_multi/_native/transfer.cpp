#include "transfer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "align.h"
#include "fault.h"

namespace fp {
namespace {

// One request never exceeds what the kernel moves in a single call (2 GiB less a page).
constexpr uint64_t kMaxRequest = 1u << 30;
constexpr unsigned kMaxIdleTries = 1000;  // EAGAIN without progress: give up rather than spin for ever
constexpr std::chrono::milliseconds kBackoff(1);

}  // namespace

Transfer::Transfer(Backend& backend, TargetFile& file, bool writing, unsigned depth)
    : backend_(backend), file_(file), writing_(writing) {
  requests_.resize(std::min(depth, backend.capacity()));
  for (uint32_t slot = static_cast<uint32_t>(requests_.size()); slot-- > 0;) free_.push_back(slot);
}

Transfer::~Transfer() {
  while (in_flight_ && !broken_) {
    completions_.clear();
    if (backend_.reap(completions_, true) < 0) return;
    in_flight_ -= static_cast<unsigned>(completions_.size());
  }
}

void Transfer::use_current_descriptor(Request& request) {
  request.direct = file_.direct();
  request.fd = file_.fd();
  request.flags = file_.flags();
}

void Transfer::start(uint64_t tag, char* buffer, uint64_t offset, uint64_t nbytes, uint64_t need) {
  if (error_ || free_.empty()) return;
  const uint32_t slot = free_.back();
  free_.pop_back();
  requests_[slot] = Request{};
  Request& request = requests_[slot];
  request.tag = tag;
  request.buffer = buffer;
  request.offset = offset;
  request.nbytes = nbytes;
  request.need = need;
  use_current_descriptor(request);
  send(slot);
}

void Transfer::send(uint32_t slot) {
  Request& r = requests_[slot];
  Io io;
  io.fd = r.fd;
  io.write = writing_;
  io.buffer = r.buffer + r.done;
  io.offset = r.offset + r.done;
  io.nbytes = static_cast<uint32_t>(std::min(r.nbytes - r.done, kMaxRequest));
  io.flags = r.flags;
  io.token = slot;
  const int result = backend_.submit(io);
  if (result == 0) {
    in_flight_++;
    submitted_++;
  } else if (result == -EAGAIN || result == -EBUSY || result == -EINTR) {
    // The kernel is short of something. It is tried again by reap(), after a completion has freed
    // resources.
    if (++r.idle_tries > kMaxIdleTries) return fail_request(r, -result), free_.push_back(slot);
    waiting_.push_back(slot);
  } else {
    fail_request(r, -result);
    free_.push_back(slot);
  }
}

void Transfer::fail_request(const Request& r, int code) {
  fail(file_.error(code, writing_ ? "write" : "read", r.offset + r.done, r.nbytes - r.done));
}

bool Transfer::handle(uint32_t slot, int64_t result) {
  Request& r = requests_[slot];
  fault::Injection injection;
  const auto point = writing_ ? fault::Point::write_completion : fault::Point::read_completion;
  if (fault::hit(point, injection)) {
    if (injection.error) result = -injection.error;
    if (injection.short_nbytes >= 0) result = std::min(result, injection.short_nbytes);
  }
  if (result > 0) {
    r.done += static_cast<uint64_t>(result);
    r.idle_tries = 0;
    if (r.done >= r.need) {
      if (writing_ && !r.direct && !r.flags) file_.written_to_cache(r.offset, r.need);
      return true;
    }
    // Short: go on behind what was moved. A direct request must begin on a page; where that would
    // not advance the rest goes through the buffered descriptor.
    if (error_) {
      free_.push_back(slot);
      return false;
    }
    resumed_++;
    if (r.direct) {
      r.done = align_down(r.done, kPage);
      if (static_cast<uint64_t>(result) < kPage) {
        r.direct = false;
        r.fd = file_.buffered_fd();
        r.flags = 0;
      }
    }
    send(slot);
    return false;
  }
  const int code = static_cast<int>(-result);
  const bool direct_refused = r.direct && code == EINVAL;
  const bool dontcache_refused = r.flags && (code == EOPNOTSUPP || code == EINVAL);
  if (error_) {
    // The job has failed already; nothing is sent again.
  } else if (code == 0) {
    // No progress and no error: the end of the file when reading, nonsense when writing.
    if (writing_) {
      fail_request(r, EIO);
    } else {
      fail(file_.error(ENODATA, "read past the end of the file", r.offset + r.done, r.need - r.done));
    }
  } else if ((code == EAGAIN || code == EINTR) && ++r.idle_tries <= kMaxIdleTries) {
    waiting_.push_back(slot);
    return false;
  } else if (direct_refused || dontcache_refused) {
    if (direct_refused ? file_.retreat_from_direct(code) : file_.retreat_from_dontcache(code)) {
      use_current_descriptor(r);
      send(slot);
      return false;
    }
    IoError refusal = file_.error(code, direct_refused ? "O_DIRECT request" : "RWF_DONTCACHE request");
    refusal.capability = true;
    fail(std::move(refusal));
  } else {
    fail_request(r, code);
  }
  free_.push_back(slot);
  return false;
}

void Transfer::reap(std::vector<uint64_t>& finished, bool wait) {
  completions_.clear();
  if (in_flight_) {
    const int result = backend_.reap(completions_, wait);
    if (result < 0) {
      broken_ = true;
      return fail(file_.error(-result, "io_uring_enter"));
    }
  }
  for (const Completion& completion : completions_) {
    in_flight_--;
    const auto slot = static_cast<uint32_t>(completion.token);
    if (!handle(slot, completion.result)) continue;
    finished.push_back(requests_[slot].tag);
    moved_ += requests_[slot].need;
    free_.push_back(slot);
  }
  // Nothing of ours will complete: somebody else must free what the kernel lacks.
  if (!in_flight_ && !waiting_.empty()) std::this_thread::sleep_for(kBackoff);
  std::vector<uint32_t> again;
  again.swap(waiting_);
  for (const uint32_t slot : again) {
    if (error_) {
      free_.push_back(slot);
    } else {
      send(slot);
    }
  }
}

}  // namespace fp

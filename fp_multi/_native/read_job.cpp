#include "read_job.h"

#include <algorithm>
#include <cstring>

#include "align.h"
#include "crc32c.h"
#include "source.h"
#include "transfer.h"

namespace fp {
namespace {

constexpr uint64_t kDeliverGrain = 256 << 10;
constexpr uint64_t kDeliverStep = 64 << 10;  // CRC, then copy, while the bytes are in the cache
constexpr double kCachedEnough = 0.5;
// Who reads that much more than is wanted reads columns out of rows, as a rule beside other processes of this host that
// want the other columns: the drive should give the bytes once.
constexpr double kShared = 1.5;
constexpr uint64_t kSharedNbytes = 8u << 20;
constexpr uint64_t kLargeSegment = 1u << 20;  // smaller memory comes from malloc, often touched already
constexpr uint64_t kPrefaultStep = 4u << 20;

// First range that ends behind `offset`, in a sorted list of disjoint ranges.
template <typename Range>
size_t first_behind(const std::vector<Range>& ranges, uint64_t offset) {
  return static_cast<size_t>(std::partition_point(ranges.begin(), ranges.end(),
                                                  [&](const Range& r) { return r.offset + r.nbytes <= offset; }) -
                             ranges.begin());
}

}  // namespace

ReadJob::ReadJob(std::string path, std::vector<Op> ops, std::vector<Segment> segments, std::vector<Chunk> chunks,
                 const IoOptions& options)
    : path_(std::move(path)),
      ops_(std::move(ops)),
      segments_(std::move(segments)),
      chunks_(std::move(chunks)),
      options_(options),
      crcs_(std::make_unique<std::atomic<uint32_t>[]>(chunks_.size())) {}

void ReadJob::run(Workshop& workshop) {
  const double begin = monotonic_s();
  Backend* backend = workshop.backend(options_, stats.reasons, error);
  if (!backend) return;
  stats.engine = backend->name();
  TargetFile file(path_, options_);
  error = file.open_read();
  // Copying from memory beats reading the drive again.
  if (!error && options_.direct == Capability::automatic) {
    if (mostly_cached(file))
      file.stay_in_cache("direct: the file is in the page cache");
    else if (mostly_unwanted())
      file.stay_in_cache("direct: most of what is read is not wanted here, and left in the page cache for others");
  }
  if (!error) error = file.choose_direct(false);
  stats.open_s = monotonic_s() - begin;
  if (!error) transfer(workshop, *backend, file);
  stats.direct = file.direct();
  stats.transfer_s = monotonic_s() - begin - stats.open_s;
  stats.reasons.insert(stats.reasons.end(), file.reasons.begin(), file.reasons.end());
}

bool ReadJob::mostly_cached(const TargetFile& file) const {
  if (ops_.empty()) return false;
  const uint64_t begin = ops_.front().offset, end = ops_.back().offset + ops_.back().nbytes;
  return sys::cached_share(file.buffered_fd(), begin, end - begin) >= kCachedEnough;
}

bool ReadJob::mostly_unwanted() const {
  uint64_t wanted = 0, read = 0;
  for (const Segment& segment : segments_) wanted += segment.nbytes;
  for (const Op& op : ops_) read += op.nbytes;
  return wanted && read >= kSharedNbytes && static_cast<double>(read) >= kShared * static_cast<double>(wanted);
}

void ReadJob::transfer(Workshop& workshop, Backend& backend, TargetFile& file) {
  Transfer transfer(backend, file, false, options_.depth);
  const bool staging = std::any_of(ops_.begin(), ops_.end(), [](const Op& op) { return op.to == nullptr; });
  if (staging) {
    if (const int code = workshop.arena().reserve(options_.block_bytes, options_.depth)) {
      error = file.error(code, "staging memory", 0, options_.block_bytes * options_.depth);
      return;
    }
  }
  Pool& pool = workshop.pool(options_.copy_threads);
  std::vector<char*> buffers(ops_.size());
  std::vector<char*> free;
  if (staging)
    for (unsigned i = 0; i < options_.depth; i++) free.push_back(workshop.arena().block(i));

  Prefault prefault(fresh_memory());
  std::vector<uint64_t> finished;
  size_t next = 0;
  const auto fill_queue = [&] {
    while (next < ops_.size() && !transfer.full() && !transfer.error()) {
      const Op& op = ops_[next];
      if (!op.to && free.empty()) return;
      char* to = op.to;
      if (!to) {
        to = free.back();
        free.pop_back();
      }
      buffers[next] = to;
      prefault.advance(op.offset);
      // Direct requests are whole pages: over the end of the file the kernel just stops. Final
      // memory holds whole pages already, staging blocks have the room.
      const uint64_t nbytes = op.to ? op.nbytes : align_up(op.nbytes, kPage);
      transfer.start(next, to, op.offset, nbytes, op.nbytes);
      next++;
    }
  };
  for (;;) {
    if (cancelled()) transfer.fail(file.error(ECANCELED, "read"));
    fill_queue();
    if (finished.empty() && transfer.idle()) break;
    transfer.reap(finished, finished.empty());
    if (transfer.broken()) break;
    if (finished.empty()) continue;
    // The queue is refilled before the (slow) delivery, so that the drive never waits for the CPU.
    fill_queue();
    const uint64_t index = finished.back();
    finished.pop_back();
    const Op& op = ops_[index];
    const char* data = buffers[index];
    const uint64_t begin = op.offset;
    pool.run(begin, begin + op.nbytes, kDeliverGrain,
             [&](uint64_t a, uint64_t b) { deliver(a, b, data + (a - begin), op.to == nullptr); });
    moved_.fetch_add(op.nbytes, std::memory_order_relaxed);
    if (!op.to) free.push_back(buffers[index]);
  }
  if (transfer.broken()) {
    workshop.discard_backend(&backend);
    abandoned = true;
  }
  error = transfer.error();
  stats.requests = transfer.requests();
  stats.resumed = transfer.resumed();
}

std::vector<Prefault::Range> ReadJob::fresh_memory() const {
  std::vector<Prefault::Range> ranges;
  for (const Segment& segment : segments_) {
    if (segment.nbytes < kLargeSegment) continue;
    for (uint64_t at = 0; at < segment.nbytes; at += kPrefaultStep)
      ranges.push_back({segment.offset + at, std::min(kPrefaultStep, segment.nbytes - at), segment.to + at});
  }
  return ranges;
}

void ReadJob::deliver(uint64_t begin, uint64_t end, const char* data, bool scatter) {
  size_t c = first_behind(chunks_, begin), s = scatter ? first_behind(segments_, begin) : 0;
  for (uint64_t at = begin; at < end;) {
    const uint64_t step_end = std::min(at + kDeliverStep, end);
    for (; c < chunks_.size() && chunks_[c].offset < step_end; c++) {
      const uint64_t chunk_end = chunks_[c].offset + chunks_[c].nbytes;
      const uint64_t a = std::max(at, chunks_[c].offset), b = std::min(step_end, chunk_end);
      if (a < b) add_crc(crcs_[c], crc32c_shift(crc32c(0, data + (a - begin), b - a), chunk_end - b));
      if (chunk_end > step_end) break;
    }
    for (; scatter && s < segments_.size() && segments_[s].offset < step_end; s++) {
      const Segment& segment = segments_[s];
      const uint64_t segment_end = segment.offset + segment.nbytes;
      const uint64_t a = std::max(at, segment.offset), b = std::min(step_end, segment_end);
      if (a < b) std::memcpy(segment.to + (a - segment.offset), data + (a - begin), b - a);
      if (segment_end > step_end) break;
    }
    at = step_end;
  }
}

}  // namespace fp

// Reads parts of one file: straight into final memory where alignment allows, else through staging
// blocks.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "job.h"
#include "prefault.h"
#include "target_file.h"

namespace fp {

class ReadJob final : public Job {
 public:
  // One request. `to` null: into a staging block (then nbytes <= block_bytes), whose content goes
  // to the segments.
  struct Op {
    uint64_t offset, nbytes;
    char* to;
  };
  // A range of the file and the memory it is wanted in. Sorted by offset, disjoint.
  struct Segment {
    uint64_t offset, nbytes;
    char* to;
  };
  // A range whose CRC is wanted. Sorted, disjoint, and completely covered by the ops.
  struct Chunk {
    uint64_t offset, nbytes;
  };

  ReadJob(std::string path, std::vector<Op> ops, std::vector<Segment> segments, std::vector<Chunk> chunks,
          const IoOptions& options);

  void run(Workshop& workshop) override;
  const std::string& path() const override { return path_; }

  size_t chunks() const { return chunks_.size(); }
  uint32_t crc(size_t chunk) const { return crcs_[chunk].load(std::memory_order_relaxed); }

 private:
  void transfer(Workshop& workshop, Backend& backend, TargetFile& file);
  // Checks and distributes bytes [begin, end) of the file, which lie at `data`.
  void deliver(uint64_t begin, uint64_t end, const char* data, bool scatter);
  // Large final memory, in the order in which the file fills it.
  std::vector<Prefault::Range> fresh_memory() const;
  bool mostly_cached(const TargetFile& file) const;
  bool mostly_unwanted() const;

  const std::string path_;
  const std::vector<Op> ops_;
  const std::vector<Segment> segments_;
  const std::vector<Chunk> chunks_;
  const IoOptions options_;
  std::unique_ptr<std::atomic<uint32_t>[]> crcs_;
};

}  // namespace fp

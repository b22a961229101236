// What a file is made of: the bytes of many arrays, one behind the other, with a CRC for each
// chunk.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace fp {

// An array that is not contiguous in C order. The bytes of the file are its elements in C order.
struct Strides {
  uint64_t itemsize = 1;
  std::vector<uint64_t> shape;
  std::vector<int64_t> strides;  // bytes
  // Joins axes that lie contiguously, so that `itemsize` becomes the longest run of bytes.
  void simplify();
  // Copies bytes [begin, begin + nbytes) of the C-order byte sequence.
  void gather(const char* base, uint64_t begin, uint64_t nbytes, char* to) const;
};

struct Extent {
  const char* base = nullptr;  // null: the staging block goes out as it is (measures the drive alone)
  uint64_t nbytes = 0;
  const Strides* strides = nullptr;  // null: contiguous
};

class Source {
 public:
  // Both lists describe the whole file from its first byte on; their sums are equal.
  Source(std::vector<Extent> extents, const uint64_t* chunk_nbytes, size_t chunks,
         std::vector<std::unique_ptr<Strides>> strides);

  uint64_t nbytes() const { return starts_.back(); }
  // Copies bytes [begin, end) of the file to `to` and adds their share to the CRCs. Calls for
  // disjoint ranges may run at the same time; each byte must be filled exactly once.
  void fill(uint64_t begin, uint64_t end, char* to);
  size_t chunks() const { return chunk_starts_.size() - 1; }
  uint32_t crc(size_t chunk) const { return crcs_[chunk].load(std::memory_order_relaxed); }

 private:
  // Copies what there is of whole chunks of one size up to `end`, chunk `c` first, from one extent; 0 if that is not
  // worth it. Returns how many bytes.
  uint64_t copy_chunks(uint64_t begin, uint64_t end, size_t c, const Extent& extent, uint64_t extent_begin, char* to);

  std::vector<Extent> extents_;
  std::vector<uint64_t> starts_;        // file offset of each extent, and the end
  std::vector<uint64_t> chunk_starts_;  // likewise
  std::unique_ptr<std::atomic<uint32_t>[]> crcs_;
  std::vector<std::unique_ptr<Strides>> strides_;
};

// Adds the CRC of a part of a chunk, shifted over what follows it in the chunk, to the chunk's sum.
inline void add_crc(std::atomic<uint32_t>& sum, uint32_t shifted) { sum.fetch_xor(shifted, std::memory_order_relaxed); }

}  // namespace fp

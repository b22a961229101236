#include "source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "crc32c.h"

namespace fp {
namespace {

constexpr size_t kChunksAtOnce = 64;  // a block of 2 MiB in chunks of 32 KiB
constexpr size_t kFewestChunks = 3;
constexpr uint64_t kGatherStep = 64 << 10;  // as in copy_crc32c: the CRC pass hits the cache

template <typename Item>
void gather_items(const char* from, int64_t stride, uint64_t count, char* to) {
  for (uint64_t i = 0; i < count; i++, from += stride, to += sizeof(Item)) std::memcpy(to, from, sizeof(Item));
}

void gather_row(const char* from, int64_t stride, uint64_t count, uint64_t itemsize, char* to) {
  switch (itemsize) {
    case 1:
      return gather_items<uint8_t>(from, stride, count, to);
    case 2:
      return gather_items<uint16_t>(from, stride, count, to);
    case 4:
      return gather_items<uint32_t>(from, stride, count, to);
    case 8:
      return gather_items<uint64_t>(from, stride, count, to);
    default:
      for (uint64_t i = 0; i < count; i++, from += stride, to += itemsize) std::memcpy(to, from, itemsize);
  }
}

// Index of the range that holds `offset`, in a list of starts that ends with the end. Empty ranges
// are passed over.
size_t find(const std::vector<uint64_t>& starts, uint64_t offset) {
  return static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), offset) - starts.begin()) - 1;
}

}  // namespace

void Strides::simplify() {
  while (!shape.empty() && (shape.back() == 1 || strides.back() == static_cast<int64_t>(itemsize))) {
    itemsize *= shape.back();
    shape.pop_back();
    strides.pop_back();
  }
  if (shape.empty()) {
    shape.push_back(1);
    strides.push_back(static_cast<int64_t>(itemsize));
  }
}

void Strides::gather(const char* base, uint64_t begin, uint64_t nbytes, char* to) const {
  const size_t last = shape.size() - 1;
  uint64_t item = begin / itemsize;
  uint64_t skip = begin % itemsize;  // a block may begin inside an element
  while (nbytes) {
    uint64_t rest = item, in_row = 0;
    const char* from = base;
    for (size_t axis = shape.size(); axis-- > 0;) {
      const uint64_t index = rest % shape[axis];
      rest /= shape[axis];
      if (axis == last) in_row = index;
      from += static_cast<int64_t>(index) * strides[axis];
    }
    if (skip || nbytes < itemsize) {
      const uint64_t part = std::min(nbytes, itemsize - skip);
      std::memcpy(to, from + skip, part);
      to += part;
      nbytes -= part;
      item++;
      skip = 0;
      continue;
    }
    const uint64_t count = std::min(shape[last] - in_row, nbytes / itemsize);
    gather_row(from, strides[last], count, itemsize, to);
    to += count * itemsize;
    nbytes -= count * itemsize;
    item += count;
  }
}

Source::Source(std::vector<Extent> extents, const uint64_t* chunk_nbytes, size_t chunks,
               std::vector<std::unique_ptr<Strides>> strides)
    : extents_(std::move(extents)), strides_(std::move(strides)) {
  starts_.reserve(extents_.size() + 1);
  uint64_t at = 0;
  for (const Extent& extent : extents_) {
    starts_.push_back(at);
    at += extent.nbytes;
  }
  starts_.push_back(at);
  chunk_starts_.reserve(chunks + 1);
  at = 0;
  for (size_t i = 0; i < chunks; i++) {
    chunk_starts_.push_back(at);
    at += chunk_nbytes[i];
  }
  chunk_starts_.push_back(at);
  crcs_ = std::make_unique<std::atomic<uint32_t>[]>(chunks);
}

uint64_t Source::copy_chunks(uint64_t begin, uint64_t end, size_t c, const Extent& extent, uint64_t extent_begin,
                             char* to) {
  const uint64_t nbytes = chunk_starts_[c + 1] - chunk_starts_[c];
  if (!extent.base || extent.strides || begin != chunk_starts_[c]) return 0;
  uint32_t crcs[kChunksAtOnce];
  size_t chunks = 0;
  while (chunks < kChunksAtOnce && c + chunks + 1 < chunk_starts_.size() && chunk_starts_[c + chunks + 1] <= end &&
         chunk_starts_[c + chunks + 1] - chunk_starts_[c + chunks] == nbytes)
    chunks++;
  if (chunks < kFewestChunks) return 0;
  copy_crc32c_chunks(to, extent.base + (begin - extent_begin), nbytes, chunks, crcs);
  for (size_t i = 0; i < chunks; i++) add_crc(crcs_[c + i], crcs[i]);
  return chunks * nbytes;
}

void Source::fill(uint64_t begin, uint64_t end, char* to) {
  if (begin == end) return;
  size_t e = find(starts_, begin), c = find(chunk_starts_, begin);
  uint32_t crc = 0;
  while (begin < end) {
    while (starts_[e + 1] <= begin) e++;
    while (chunk_starts_[c + 1] <= begin) c++;
    const Extent& extent = extents_[e];
    if (const uint64_t copied = copy_chunks(begin, std::min(end, starts_[e + 1]), c, extent, starts_[e], to)) {
      begin += copied;
      to += copied;
      continue;
    }
    uint64_t step = std::min({end, starts_[e + 1], chunk_starts_[c + 1]}) - begin;
    const uint64_t inside = begin - starts_[e];
    if (!extent.base) {
      // Nothing to copy, and no CRC that means anything.
    } else if (extent.strides) {
      step = std::min(step, kGatherStep);
      extent.strides->gather(extent.base, inside, step, to);
      crc = crc32c(crc, to, step);
    } else {
      crc = copy_crc32c(crc, to, extent.base + inside, step);
    }
    begin += step;
    to += step;
    if (begin == end || begin == chunk_starts_[c + 1]) {
      add_crc(crcs_[c], crc32c_shift(crc, chunk_starts_[c + 1] - begin));
      crc = 0;
    }
  }
}

}  // namespace fp

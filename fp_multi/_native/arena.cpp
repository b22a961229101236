#include "arena.h"

#include <sys/mman.h>

#include <cerrno>

#include "align.h"
#include "sys.h"

namespace fp {

int Mapping::map(size_t nbytes, size_t unit) {
  release();
  // mmap aligns to pages only; the surplus that alignment needs is address space, never touched.
  const size_t length = align_up(nbytes ? nbytes : 1, unit) + (unit > kPage ? unit : 0);
  if (length < nbytes) return ENOMEM;
  void* base = sys::map_memory(length);
  if (!base) return errno;
  base_ = base;
  length_ = length;
  data_ =
      static_cast<char*>(base) + (align_up(reinterpret_cast<uint64_t>(base), unit) - reinterpret_cast<uint64_t>(base));
  size_ = nbytes;
  if (unit >= kHugePage) {
    // A large rest gets a huge page of its own: 512 faults less for memory that is small against the whole.
    const bool whole = nbytes % kHugePage >= kHugePage / 4 && nbytes >= 4 * kHugePage;
    ::madvise(data_, align_up(nbytes, whole ? kHugePage : kPage), MADV_HUGEPAGE);
  }
  return 0;
}

void Mapping::release() {
  if (base_) sys::unmap_memory(base_, length_);
  base_ = nullptr;
  data_ = nullptr;
  length_ = size_ = 0;
}

void* Mapping::detach(void*& base, size_t& length) {
  base = base_;
  length = length_;
  void* data = data_;
  base_ = nullptr;
  data_ = nullptr;
  length_ = size_ = 0;
  return data;
}

int Arena::reserve(size_t block_bytes, size_t blocks) {
  block_bytes_ = block_bytes;
  const size_t needed = block_bytes * blocks;
  if (memory_.size() >= needed) return 0;
  touched_ = 0;
  if (const int error = memory_.map(align_up(needed, kHugePage), kHugePage)) return error;
  ::madvise(memory_.data(), memory_.size(), MADV_DONTFORK);
  return 0;
}

void Arena::abandon() {
  void* base;
  size_t length;
  memory_.detach(base, length);
  touched_ = 0;
}

}  // namespace fp

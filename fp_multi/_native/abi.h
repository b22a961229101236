// The parts of the kernel's interface that we use, written out: distribution headers age, and
// old-but-present headers cannot be told from new ones by __has_include. Sources:
// io_uring_setup(2), io_uring_enter(2), statx(2), pwritev2(2).
#pragma once
#include <cstddef>
#include <cstdint>

namespace fp::abi {

// The same numbers on every architecture (they came after the tables were unified).
inline constexpr long kSysUringSetup = 425;
inline constexpr long kSysUringEnter = 426;
inline constexpr long kSysCachestat = 451;

inline constexpr uint32_t kSetupSingleIssuer = 1u << 12;
inline constexpr uint32_t kSetupDeferTaskrun = 1u << 13;
inline constexpr uint32_t kFeatSingleMmap = 1u << 0;
inline constexpr uint32_t kEnterGetevents = 1u << 0;
inline constexpr uint64_t kOffSqRing = 0;
inline constexpr uint64_t kOffCqRing = 0x8000000;
inline constexpr uint64_t kOffSqes = 0x10000000;
inline constexpr uint8_t kOpNop = 0;
inline constexpr uint8_t kOpRead = 22;
inline constexpr uint8_t kOpWrite = 23;

struct Sqe {
  uint8_t opcode;
  uint8_t flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t off;
  uint64_t addr;
  uint32_t len;
  uint32_t rw_flags;
  uint64_t user_data;
  uint64_t rest[3];
};
static_assert(sizeof(Sqe) == 64 && offsetof(Sqe, user_data) == 32);

struct Cqe {
  uint64_t user_data;
  int32_t res;
  uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
  uint64_t user_addr;
};
struct CqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
  uint64_t user_addr;
};
struct Params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
  SqOffsets sq_off;
  CqOffsets cq_off;
};
static_assert(sizeof(Params) == 120);

inline constexpr uint32_t kStatxDioalign = 0x2000;
inline constexpr int kAtEmptyPath = 0x1000;

struct Statx {
  uint32_t mask, blksize;
  uint64_t attributes;
  uint32_t nlink, uid, gid;
  uint16_t mode, spare0;
  uint64_t ino, size, blocks, attributes_mask;
  uint64_t times[8];
  uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
  uint64_t mnt_id;
  uint32_t dio_mem_align, dio_offset_align;
  uint64_t rest[12];
};
static_assert(sizeof(Statx) == 256 && offsetof(Statx, dio_mem_align) == 152);

inline constexpr int kRwfDontcache = 0x80;

}  // namespace fp::abi

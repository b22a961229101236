#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace fp {
namespace {

constexpr uint32_t kPoly = 0x82F63B78;  // reflected
// Bytes of each of the three streams of the main loop: multiples of a cache line, each a shift
// table of 4 KiB.
constexpr size_t kStreams[] = {64 << 10, 8 << 10, 256};
constexpr size_t kLine = 64;
constexpr size_t kAhead = 1024;         // how far before its use a line is asked for
constexpr size_t kCopyStep = 16 << 10;  // stays in the first-level cache between copy and CRC (portable version)

// a * b modulo the polynomial, on reflected bit order (bit 31 is x^0).
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? (b >> 1) ^ kPoly : b >> 1;
  }
  return product;
}

// x^(8 * 2^k) for each k.
constexpr std::array<uint32_t, 64> make_powers() {
  std::array<uint32_t, 64> powers{};
  uint32_t p = 1u << 30;  // x^1
  for (int i = 0; i < 3; i++) p = multiply(p, p);
  for (auto& power : powers) {
    power = p;
    p = multiply(p, p);
  }
  return powers;
}
constexpr auto kPowers = make_powers();

constexpr uint32_t power_of_bytes(uint64_t nbytes) {
  uint32_t p = 1u << 31;  // x^0
  for (unsigned k = 0; nbytes; nbytes >>= 1, k++)
    if (nbytes & 1) p = multiply(p, kPowers[k]);
  return p;
}

using Table = std::array<std::array<uint32_t, 256>, 8>;

Table make_slices() {
  Table table{};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >> 1) ^ kPoly : crc >> 1;
    table[0][i] = crc;
  }
  for (uint32_t i = 0; i < 256; i++)
    for (size_t k = 1; k < 8; k++) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 0xff];
  return table;
}

const Table& slices() {
  static const Table table = make_slices();
  return table;
}

#if defined(__x86_64__) || defined(__aarch64__)

// Multiplication by a fixed power of x, one table look-up a byte: what joins the three streams.
struct Shifter {
  std::array<std::array<uint32_t, 256>, 4> table{};
  explicit Shifter(size_t nbytes) {
    const uint32_t power = power_of_bytes(nbytes);
    for (uint32_t k = 0; k < 4; k++)
      for (uint32_t i = 0; i < 256; i++) table[k][i] = multiply(power, i << (8 * k));
  }
  uint32_t operator()(uint32_t crc) const {
    return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^ table[3][crc >> 24];
  }
};

#if defined(__x86_64__)
#define FP_CRC_TARGET __attribute__((target("sse4.2")))
FP_CRC_TARGET inline uint32_t step8(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
FP_CRC_TARGET inline uint32_t step1(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
bool have_instructions() { return __builtin_cpu_supports("sse4.2"); }
constexpr const char* kHardware = "sse4.2";
#else
#define FP_CRC_TARGET __attribute__((target("+crc")))
FP_CRC_TARGET inline uint32_t step8(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
FP_CRC_TARGET inline uint32_t step1(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
bool have_instructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
constexpr const char* kHardware = "armv8-crc";
#endif

bool use_hardware() {
  static const bool hardware = have_instructions();
  return hardware;
}

inline uint64_t word_at(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

// The instruction takes three cycles but a new one can start every cycle: three streams side by
// side keep it busy, and three places of memory are fetched from at once. With Copy each word is
// also stored, from the register that was checksummed: the CRC costs no second pass, and it
// describes what is stored even if the source changes meanwhile.
struct Lanes {
  uint32_t a, b, c;
};

// Whole cache lines of three streams that follow each other, `stream` bytes each: those from
// `begin` to `end` of each.
template <bool Copy>
FP_CRC_TARGET inline Lanes three_lanes(Lanes crc, const uint8_t* p, uint8_t* to, size_t stream, size_t begin,
                                       size_t end) {
  for (size_t line = begin; line < end; line += kLine) {
    const uint8_t* q = p + line;
    __builtin_prefetch(q + kAhead);
    __builtin_prefetch(q + stream + kAhead);
    __builtin_prefetch(q + 2 * stream + kAhead);
    for (size_t i = 0; i < kLine; i += 8) {
      const uint64_t x = word_at(q + i), y = word_at(q + stream + i), z = word_at(q + 2 * stream + i);
      crc.a = step8(crc.a, x);
      crc.b = step8(crc.b, y);
      crc.c = step8(crc.c, z);
      if constexpr (Copy) {
        std::memcpy(to + line + i, &x, 8);
        std::memcpy(to + line + stream + i, &y, 8);
        std::memcpy(to + line + 2 * stream + i, &z, 8);
      }
    }
  }
  return crc;
}

template <bool Copy>
FP_CRC_TARGET uint32_t three_streams(uint32_t crc, const uint8_t*& p, uint8_t*& to, size_t& nbytes, size_t stream,
                                     const Shifter& shift) {
  while (nbytes >= 3 * stream) {
    const Lanes lanes = three_lanes<Copy>({crc, 0, 0}, p, to, stream, 0, stream);
    crc = shift(shift(lanes.a) ^ lanes.b) ^ lanes.c;
    p += 3 * stream;
    if constexpr (Copy) to += 3 * stream;
    nbytes -= 3 * stream;
  }
  return crc;
}

FP_CRC_TARGET void copy_three_runs(char* to, const char* from, size_t chunk_nbytes, size_t chunks, uint32_t* crcs) {
  const auto* p = reinterpret_cast<const uint8_t*>(from);
  for (size_t i = 0; i < chunks; i++) {
    const Lanes lanes = three_lanes<true>({~0u, ~0u, ~0u}, p, reinterpret_cast<uint8_t*>(to), chunks * chunk_nbytes,
                                          i * chunk_nbytes, (i + 1) * chunk_nbytes);
    crcs[i] = ~lanes.a;
    crcs[chunks + i] = ~lanes.b;
    crcs[2 * chunks + i] = ~lanes.c;
  }
}

template <bool Copy>
FP_CRC_TARGET uint32_t crc32c_hardware(uint32_t crc, uint8_t* to, const uint8_t* p, size_t nbytes) {
  static const Shifter shifts[] = {Shifter(kStreams[0]), Shifter(kStreams[1]), Shifter(kStreams[2])};
  crc = ~crc;
  for (size_t k = 0; k < std::size(kStreams); k++)
    crc = three_streams<Copy>(crc, p, to, nbytes, kStreams[k], shifts[k]);
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    const uint64_t word = word_at(p);
    crc = step8(crc, word);
    if constexpr (Copy) {
      std::memcpy(to, &word, 8);
      to += 8;
    }
  }
  for (; nbytes; nbytes--, p++) {
    const uint8_t byte = *p;
    crc = step1(crc, byte);
    if constexpr (Copy) *to++ = byte;
  }
  return ~crc;
}

#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t nbytes) {
  const Table& t = slices();
  const auto* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    const uint32_t low = crc ^ (static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 |
                                static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24);
    crc = t[7][low & 0xff] ^ t[6][(low >> 8) & 0xff] ^ t[5][(low >> 16) & 0xff] ^ t[4][low >> 24] ^ t[3][p[4]] ^
          t[2][p[5]] ^ t[1][p[6]] ^ t[0][p[7]];
  }
  for (; nbytes; nbytes--, p++) crc = (crc >> 8) ^ t[0][(crc ^ *p) & 0xff];
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t nbytes) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (use_hardware()) return crc32c_hardware<false>(crc, nullptr, static_cast<const uint8_t*>(data), nbytes);
#endif
  return crc32c_portable(crc, data, nbytes);
}

uint32_t crc32c_shift(uint32_t crc, uint64_t nbytes) { return nbytes ? multiply(power_of_bytes(nbytes), crc) : crc; }

const char* crc32c_implementation() {
#if defined(__x86_64__) || defined(__aarch64__)
  if (use_hardware()) return kHardware;
#endif
  return "portable";
}

uint32_t copy_crc32c(uint32_t crc, char* to, const char* from, size_t nbytes) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (use_hardware())
    return crc32c_hardware<true>(crc, reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from), nbytes);
#endif
  while (nbytes) {
    const size_t step = std::min(nbytes, kCopyStep);
    std::memcpy(to, from, step);
    crc = crc32c_portable(crc, to, step);
    to += step;
    from += step;
    nbytes -= step;
  }
  return crc;
}

void copy_crc32c_chunks(char* to, const char* from, size_t chunk_nbytes, size_t chunks, uint32_t* crcs) {
  size_t done = 0;
#if defined(__x86_64__) || defined(__aarch64__)
  if (use_hardware() && chunk_nbytes % kLine == 0) {
    copy_three_runs(to, from, chunk_nbytes, chunks / 3, crcs);
    done = chunks / 3 * 3;
  }
#endif
  for (; done < chunks; done++)
    crcs[done] = copy_crc32c(0, to + done * chunk_nbytes, from + done * chunk_nbytes, chunk_nbytes);
}

}  // namespace fp

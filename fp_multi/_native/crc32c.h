// CRC-32C (Castagnoli, RFC 3720 appendix B.4): hardware where the CPU has it, a table otherwise.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fp {

// CRC of `nbytes` bytes appended to data whose CRC is `crc` (0 for none).
uint32_t crc32c(uint32_t crc, const void* data, size_t nbytes);
// The same without special instructions.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t nbytes);
// crc32c(A followed by B) == crc32c_shift(crc32c(A), |B|) ^ crc32c(B). It is associative and
// commutative enough that parts of a chunk may be summed up in any order, by any thread.
uint32_t crc32c_shift(uint32_t crc, uint64_t nbytes);
const char* crc32c_implementation();

// memcpy and CRC of the copied bytes in one pass. The CRC is that of the bytes stored at `to`,
// whatever happens to the source meanwhile.
uint32_t copy_crc32c(uint32_t crc, char* to, const char* from, size_t nbytes);
// The same for chunks of one size that follow each other, a CRC for each. Faster by a quarter where
// chunks are small: memory is read at places far apart.
void copy_crc32c_chunks(char* to, const char* from, size_t chunk_nbytes, size_t chunks, uint32_t* crcs);

}  // namespace fp

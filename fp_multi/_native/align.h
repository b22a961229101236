// The only place of the engine where alignment is computed. `unit` is always a power of two.
#pragma once
#include <cstdint>

namespace fp {

inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kHugePage = 2u << 20;

constexpr uint64_t align_down(uint64_t value, uint64_t unit) { return value & ~(unit - 1); }
constexpr uint64_t align_up(uint64_t value, uint64_t unit) { return align_down(value + unit - 1, unit); }
constexpr bool is_aligned(uint64_t value, uint64_t unit) { return (value & (unit - 1)) == 0; }

}  // namespace fp

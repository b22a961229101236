// How failures travel: as values, never as exceptions across threads.
#pragma once
#include <cerrno>
#include <cstdint>
#include <string>

namespace fp {

// The first thing that went wrong in a job. `code` is an errno value; 0 means nothing did.
struct IoError {
  int code = 0;
  std::string op;    // "write", "fallocate", ...
  std::string path;  // the file
  uint64_t offset = 0;
  uint64_t nbytes = 0;
  bool capability = false;  // a capability that is switched on is not available
  explicit operator bool() const { return code != 0; }
};

}  // namespace fp

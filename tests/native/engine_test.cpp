// Native tests of the engine, for the sanitizers: no Python in between. Exit status 0 and a last line
// "engine: N passed, 0 failed". Run by `make asan`.
#include "engine.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "align.h"
#include "arena.h"
#include "crc32c.h"
#include "fault.h"
#include "read_job.h"
#include "source.h"
#include "sys.h"
#include "write_job.h"

using namespace fp;

namespace {

int passed = 0, failed = 0;

void check(bool ok, const char* what, const char* file, int line) {
  if (ok) {
    passed++;
    return;
  }
  failed++;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}
#define CHECK(...) check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

std::string directory;

std::vector<char> random_bytes(size_t nbytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> out(nbytes);
  for (char& c : out) c = static_cast<char>(random());
  return out;
}

std::vector<char> contents(const std::string& path) {
  std::vector<char> out;
  const int fd = ::open(path.c_str(), O_RDONLY);
  struct stat st{};
  if (fd < 0 || ::fstat(fd, &st) != 0) return out;
  out.resize(static_cast<size_t>(st.st_size));
  if (::pread(fd, out.data(), out.size(), 0) != st.st_size) out.clear();
  ::close(fd);
  return out;
}

void remove_file(const std::string& path) { ::unlink(path.c_str()); }

std::shared_ptr<WriteJob> write(Engine& engine, const std::string& path, const std::vector<std::vector<char>>& parts,
                                const WriteOptions& options, uint64_t chunk = 10000) {
  std::vector<Extent> extents;
  uint64_t total = 0;
  for (const auto& part : parts) {
    extents.push_back({part.data(), part.size(), nullptr});
    total += part.size();
  }
  std::vector<uint64_t> chunks;
  for (uint64_t at = 0; at < total; at += chunk) chunks.push_back(std::min(chunk, total - at));
  auto source =
      std::make_unique<Source>(extents, chunks.data(), chunks.size(), std::vector<std::unique_ptr<Strides>>{});
  auto job = std::make_shared<WriteJob>(path, std::move(source), options);
  CHECK(engine.submit(job));
  job->wait(-1);
  return job;
}

std::vector<char> joined(const std::vector<std::vector<char>>& parts) {
  std::vector<char> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

WriteOptions options(Capability ring, Capability direct, unsigned threads) {
  WriteOptions o;
  o.block_bytes = 64 << 10;
  o.depth = 3;
  o.copy_threads = threads;
  o.io_uring = ring;
  o.direct = direct;
  return o;
}

void test_crc() {
  CHECK(crc32c(0, "123456789", 9) == 0xE3069283);
  CHECK(crc32c_portable(0, "123456789", 9) == 0xE3069283);
  const auto data = random_bytes(600000, 1);
  std::vector<char> copy(data.size());
  for (size_t n : {0, 1, 7, 8, 63, 767, 768, 24575, 24576, 196608, 196609, 600000}) {
    const uint32_t expected = crc32c_portable(0, data.data(), n);
    CHECK(crc32c(0, data.data(), n) == expected);
    CHECK(copy_crc32c(0, copy.data(), data.data(), n) == expected);
    CHECK(std::memcmp(copy.data(), data.data(), n) == 0);
    const size_t half = n / 3;
    CHECK((crc32c_shift(crc32c(0, data.data(), half), n - half) ^ crc32c(0, data.data() + half, n - half)) == expected);
  }
}

void test_crc_of_chunks() {
  const auto data = random_bytes(600000, 3);
  for (const auto& [nbytes, chunks] :
       {std::pair<size_t, size_t>{64, 7}, {4096, 1}, {4096, 16}, {32768, 18}, {100, 8}}) {
    std::vector<char> copy(data.size());
    std::vector<uint32_t> crcs(chunks);
    copy_crc32c_chunks(copy.data(), data.data(), nbytes, chunks, crcs.data());
    CHECK(std::memcmp(copy.data(), data.data(), nbytes * chunks) == 0);
    CHECK(std::all_of(copy.begin() + static_cast<long>(nbytes * chunks), copy.end(), [](char c) { return c == 0; }));
    for (size_t i = 0; i < chunks; i++) CHECK(crcs[i] == crc32c_portable(0, data.data() + i * nbytes, nbytes));
  }
}

void test_source_fills_in_pieces() {
  // Chunks of one size, an odd one, and such as begin in one extent and end in the next.
  const auto data = random_bytes(900000, 4);
  const std::vector<uint64_t> chunks{32768, 32768, 32768, 32768, 32768, 32768, 1000, 65536, 65536, 65536, 65536, 65536};
  uint64_t total = 0;
  for (const uint64_t chunk : chunks) total += chunk;
  const uint64_t cut = 400000;
  for (const uint64_t piece : {total, uint64_t{131072}, uint64_t{100000}, uint64_t{4096}}) {
    Source source({{data.data(), cut, nullptr}, {data.data() + cut, total - cut, nullptr}}, chunks.data(),
                  chunks.size(), std::vector<std::unique_ptr<Strides>>{});
    std::vector<char> out(total);
    for (uint64_t at = 0; at < total; at += piece) source.fill(at, std::min(at + piece, total), out.data() + at);
    CHECK(std::memcmp(out.data(), data.data(), total) == 0);
    uint64_t at = 0;
    for (size_t i = 0; i < chunks.size(); at += chunks[i++])
      CHECK(source.crc(i) == crc32c_portable(0, data.data() + at, chunks[i]));
  }
}

void test_strides() {
  // A transposed 5 x 7 array of 6-byte elements, read in pieces that cut elements.
  const auto base = random_bytes(5 * 7 * 6, 2);
  Strides strides{6, {7, 5}, {6, 42}};
  strides.simplify();
  std::vector<char> expected;
  for (size_t i = 0; i < 7; i++)
    for (size_t j = 0; j < 5; j++)
      expected.insert(expected.end(), base.begin() + static_cast<long>(j * 42 + i * 6),
                      base.begin() + static_cast<long>(j * 42 + i * 6 + 6));
  for (size_t step : {1, 4, 6, 13, 210}) {
    std::vector<char> out(expected.size());
    for (size_t at = 0; at < out.size(); at += step)
      strides.gather(base.data(), at, std::min(step, out.size() - at), out.data() + at);
    CHECK(out == expected);
  }
}

void test_round_trips() {
  Engine engine;
  const std::string path = directory + "/round";
  const std::vector<std::vector<size_t>> shapes = {
      {}, {0}, {1}, {511}, {4096}, {4095, 2}, {65536}, {65537}, {65535, 1, 0}, {300000, 17}, {7, 200000, 99}};
  for (const Capability ring : {Capability::automatic, Capability::off})
    for (const Capability direct : {Capability::automatic, Capability::off})
      for (const unsigned threads : {1u, 3u})
        for (const auto& sizes : shapes) {
          std::vector<std::vector<char>> parts;
          for (const size_t n : sizes) parts.push_back(random_bytes(n, static_cast<unsigned>(n) + 3));
          const auto all = joined(parts);
          auto job = write(engine, path, parts, options(ring, direct, threads));
          CHECK(!job->error);
          CHECK(contents(path) == all);
          for (size_t i = 0; i < job->chunks(); i++)
            CHECK(job->crc(i) == crc32c(0, all.data() + i * 10000, std::min<size_t>(10000, all.size() - i * 10000)));
          std::vector<char> back(all.size());
          std::vector<ReadJob::Op> ops;
          for (uint64_t at = 0; at < all.size(); at += 65536)
            ops.push_back({at, std::min<uint64_t>(65536, all.size() - at), nullptr});
          std::vector<ReadJob::Segment> segments;
          if (!all.empty()) segments.push_back({0, all.size(), back.data()});
          std::vector<ReadJob::Chunk> chunks;
          for (uint64_t at = 0; at < all.size(); at += 10000)
            chunks.push_back({at, std::min<uint64_t>(10000, all.size() - at)});
          IoOptions reading = options(ring, direct, threads);
          auto read = std::make_shared<ReadJob>(path, ops, segments, chunks, reading);
          CHECK(engine.submit(read));
          read->wait(-1);
          CHECK(!read->error);
          CHECK(back == all);
          for (size_t i = 0; i < chunks.size(); i++) CHECK(read->crc(i) == job->crc(i));
          remove_file(path);
        }
}

void test_reuse() {
  Engine engine;
  const std::string path = directory + "/reuse";
  WriteOptions o = options(Capability::automatic, Capability::automatic, 1);
  CHECK(!write(engine, path, {random_bytes(500000, 4)}, o)->error);
  CHECK(write(engine, path, {random_bytes(10, 4)}, o)->error.code == EEXIST);
  o.reuse = true;
  for (const size_t n : {500000, 300001, 0, 700000}) {
    const auto data = random_bytes(n, 5);
    CHECK(!write(engine, path, {data}, o)->error);
    CHECK(contents(path) == data);
  }
  remove_file(path);
}

void test_faults() {
  Engine engine;
  const std::string path = directory + "/faults";
  const auto data = random_bytes(400003, 6);
  for (const Capability ring : {Capability::automatic, Capability::off}) {
    WriteOptions o = options(ring, Capability::automatic, 1);
    for (const int64_t cut : {1, 511, 4096, 4097}) {  // resumed
      fault::inject("write_completion", 1, 4, 0, cut, false);
      auto job = write(engine, path, {data}, o);
      fault::clear();
      CHECK(!job->error);
      CHECK(job->stats.resumed > 0);
      CHECK(contents(path) == data);
      remove_file(path);
    }
    for (const char* point : {"open", "fallocate", "fdatasync", "write_completion", "close"}) {
      fault::inject(point, 1, 1, EIO, -1, false);
      auto job = write(engine, path, {data}, o);
      fault::clear();
      CHECK(job->error.code == EIO);
      CHECK(job->error.path == path);
      remove_file(path);
    }
    fault::inject("write_completion", 2, 3, EAGAIN, -1, false);  // transient
    CHECK(!write(engine, path, {data}, o)->error);
    fault::clear();
    CHECK(contents(path) == data);
    remove_file(path);
  }
  fault::inject("uring_setup", 1, 2, EPERM, -1, false);
  int code = 0;
  std::string step;
  code = probe_io_uring(step);
  fault::clear();
  CHECK(code == EPERM && step == "io_uring_setup");
  CHECK(write(engine, directory + "/no/such/dir", {data}, options(Capability::automatic, Capability::automatic, 1))
            ->error.code == ENOENT);
}

void test_fence() {
  Engine engine;
  const std::string path = directory + "/fence";
  for (const uint64_t limit : {0ull, 300000ull, ~0ull}) {
    for (const uint64_t first : {1ull, 70000ull, 2000000ull}) {  // staged before the fence comes
      auto data = random_bytes((5 << 20) + 77, 8);
      const auto expected = data;
      const uint64_t chunks[] = {data.size()};
      auto source = std::make_unique<Source>(std::vector<Extent>{{data.data(), data.size(), nullptr}}, chunks, 1,
                                             std::vector<std::unique_ptr<Strides>>{});
      auto job =
          std::make_shared<WriteJob>(path, std::move(source), options(Capability::automatic, Capability::automatic, 2));
      CHECK(engine.submit(job));
      CHECK(job->wait_staged(first, -1));
      job->fence(limit);
      CHECK(job->wait_staged(data.size(), -1));
      std::memset(data.data(), 0, data.size());  // what an optimizer step does
      CHECK(job->wait(-1));
      CHECK(!job->error);
      CHECK(job->moved_nbytes() == expected.size());
      CHECK(contents(path) == expected);
      CHECK(job->crc(0) == crc32c(0, expected.data(), expected.size()));
      CHECK(limit != 0 || job->stats.copied_nbytes == 0);
      remove_file(path);
    }
  }
}

void test_cancel_and_close() {
  auto engine = std::make_unique<Engine>();
  const auto data = random_bytes(4 << 20, 7);
  std::vector<uint64_t> chunks = {data.size()};
  auto source = std::make_unique<Source>(std::vector<Extent>{{data.data(), data.size(), nullptr}}, chunks.data(), 1,
                                         std::vector<std::unique_ptr<Strides>>{});
  auto job = std::make_shared<WriteJob>(directory + "/cancelled", std::move(source),
                                        options(Capability::automatic, Capability::automatic, 1));
  job->set_ready_nbytes(100000);  // it waits for the rest
  CHECK(engine->submit(job));
  CHECK(job->wait_staged(65536, -1));
  CHECK(!job->wait(0.01));
  job->cancel();
  CHECK(job->wait(-1));
  CHECK(job->error.code == ECANCELED);
  CHECK(job->staged_nbytes() < data.size());
  engine->close();
  CHECK(!engine->usable());
  CHECK(!engine->submit(job));
  remove_file(directory + "/cancelled");
}

}  // namespace

int main() {
  char name[] = "./engine_test_XXXXXX";
  if (!::mkdtemp(name)) return 2;
  directory = name;
  test_crc();
  test_crc_of_chunks();
  test_source_fills_in_pieces();
  test_strides();
  test_round_trips();
  test_reuse();
  test_faults();
  test_fence();
  test_cancel_and_close();
  ::rmdir(name);
  std::printf("engine: %d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}

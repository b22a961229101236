// The Python face of the engine: conversions and GIL release, no logic.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "align.h"
#include "arena.h"
#include "crc32c.h"
#include "engine.h"
#include "fault.h"
#include "read_job.h"
#include "sys.h"
#include "write_job.h"

namespace nb = nanobind;
using namespace nb::literals;

// A path as Python has it, any bytes included: not always valid UTF-8.
struct FsPath {
  std::string text;
};

template <>
struct nanobind::detail::type_caster<FsPath> {
  NB_TYPE_CASTER(FsPath, const_name("str"))
  bool from_python(handle src, uint8_t, cleanup_list*) noexcept {
    PyObject* bytes = nullptr;
    if (!PyUnicode_FSConverter(src.ptr(), &bytes)) {
      PyErr_Clear();
      return false;
    }
    value.text.assign(PyBytes_AsString(bytes), static_cast<size_t>(PyBytes_Size(bytes)));
    Py_DECREF(bytes);
    return true;
  }
};

namespace {

template <size_t Ndim>
using U64 = nb::ndarray<const uint64_t, nb::ndim<Ndim>, nb::c_contig, nb::device::cpu>;

// Without the GIL. If the interpreter goes down meanwhile (a daemon thread at exit), Python up to 3.13
// ends the thread inside PyEval_RestoreThread by unwinding its stack, and the C++ frames on it would
// turn that into an abort of the process: the thread is stopped here instead, as later Pythons do.
struct GilReleased {
  PyThreadState* state = PyEval_SaveThread();
  GilReleased() = default;
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state);
    } catch (...) {
      for (;;) ::pause();
    }
  }
};
using NoGil = nb::call_guard<GilReleased>;

// A job as Python holds it, with the owner of the memory that the job uses. When an exception drops it
// unfinished, the memory stays until the engine has let go of it.
template <typename T>
struct Handle {
  nb::object keepalive;
  std::shared_ptr<T> job;
  int pid = ::getpid();
  Handle(std::shared_ptr<T> j, nb::object k) : keepalive(std::move(k)), job(std::move(j)) {}
  Handle(Handle&&) = default;
  ~Handle() {
    if (!job) return;
    if (::getpid() != pid) {
      // A forked child leaks the job: destroying a condition variable that a thread of the parent was
      // waiting on would hang.
      new std::shared_ptr<T>(std::move(job));
      return;
    }
    if (!job->done()) {
      job->cancel();
      const GilReleased released;
      job->wait(-1);
    }
    if (job->abandoned) keepalive.release();
  }
  T* operator->() const { return job.get(); }
};
using Write = Handle<fp::WriteJob>;
using Read = Handle<fp::ReadJob>;

fp::Capability capability(const std::string& text) {
  if (text == "on") return fp::Capability::on;
  if (text == "off") return fp::Capability::off;
  if (text == "auto") return fp::Capability::automatic;
  throw std::invalid_argument("a capability is \"on\", \"off\" or \"auto\", found \"" + text + "\"");
}

void set_options(fp::IoOptions& options, uint64_t block_bytes, unsigned depth, unsigned copy_threads,
                 const std::string& io_uring, const std::string& direct, const std::string& dontcache) {
  if (!block_bytes || block_bytes % fp::kPage || block_bytes > (1u << 30) || !depth || depth > 64 || !copy_threads ||
      copy_threads > 64)
    throw std::invalid_argument("block_bytes, queue_depth or copy_threads out of range");
  options.block_bytes = block_bytes;
  options.depth = depth;
  options.copy_threads = copy_threads;
  options.io_uring = capability(io_uring);
  options.direct = capability(direct);
  options.dontcache = capability(dontcache);
}

template <typename T>
char* address(T value) {
  return reinterpret_cast<char*>(static_cast<uintptr_t>(value));
}

Write submit_write(fp::Engine& engine, const FsPath& path, U64<2> extents, U64<1> chunk_nbytes,
                   const std::vector<std::tuple<uint64_t, std::vector<uint64_t>, std::vector<int64_t>>>& layouts,
                   uint64_t block_bytes, unsigned queue_depth, unsigned copy_threads, const std::string& io_uring,
                   const std::string& direct, const std::string& dontcache, bool reuse, bool durable,
                   uint64_t ready_nbytes, uint64_t spill_nbytes, nb::object keepalive) {
  fp::WriteOptions options;
  set_options(options, block_bytes, queue_depth, copy_threads, io_uring, direct, dontcache);
  options.reuse = reuse;
  options.durable = durable;
  options.spill_nbytes = spill_nbytes;
  if (extents.shape(1) != 3) throw std::invalid_argument("extents has three columns");
  std::vector<std::unique_ptr<fp::Strides>> strides;
  for (const auto& [itemsize, shape, steps] : layouts) {
    if (shape.size() != steps.size() || !itemsize) throw std::invalid_argument("a layout has as many strides as axes");
    strides.push_back(std::make_unique<fp::Strides>(fp::Strides{itemsize, shape, steps}));
    strides.back()->simplify();
  }
  std::vector<fp::Extent> list(extents.shape(0));
  uint64_t total = 0, covered = 0;
  for (size_t i = 0; i < list.size(); i++) {
    const uint64_t layout = extents(i, 2);
    if (layout > strides.size()) throw std::invalid_argument("an extent names a layout that is not there");
    list[i] = {address(extents(i, 0)), extents(i, 1), layout ? strides[layout - 1].get() : nullptr};
    total += extents(i, 1);
  }
  for (size_t i = 0; i < chunk_nbytes.shape(0); i++) covered += chunk_nbytes(i);
  if (total != covered) throw std::invalid_argument("chunks must cover the extents exactly");
  auto source =
      std::make_unique<fp::Source>(std::move(list), chunk_nbytes.data(), chunk_nbytes.shape(0), std::move(strides));
  auto job = std::make_shared<fp::WriteJob>(path.text, std::move(source), options);
  if (ready_nbytes < total) job->set_ready_nbytes(ready_nbytes);
  if (!engine.submit(job)) throw std::runtime_error("the engine is closed");
  return Write(std::move(job), std::move(keepalive));
}

Read submit_read(fp::Engine& engine, const FsPath& path, U64<2> ops, U64<2> segments, U64<2> chunks,
                 uint64_t block_bytes, unsigned queue_depth, unsigned copy_threads, const std::string& io_uring,
                 const std::string& direct, const std::string& dontcache, nb::object keepalive) {
  fp::IoOptions options;
  set_options(options, block_bytes, queue_depth, copy_threads, io_uring, direct, dontcache);
  if (ops.shape(1) != 3 || segments.shape(1) != 3 || chunks.shape(1) != 2)
    throw std::invalid_argument("ops and segments have three columns, chunks has two");
  std::vector<fp::ReadJob::Op> op_list(ops.shape(0));
  for (size_t i = 0; i < op_list.size(); i++) {
    op_list[i] = {ops(i, 0), ops(i, 1), address(ops(i, 2))};
    if (!op_list[i].to && op_list[i].nbytes > block_bytes)
      throw std::invalid_argument("a staged request is larger than a block");
  }
  std::vector<fp::ReadJob::Segment> segment_list(segments.shape(0));
  for (size_t i = 0; i < segment_list.size(); i++)
    segment_list[i] = {segments(i, 0), segments(i, 1), address(segments(i, 2))};
  std::vector<fp::ReadJob::Chunk> chunk_list(chunks.shape(0));
  for (size_t i = 0; i < chunk_list.size(); i++) chunk_list[i] = {chunks(i, 0), chunks(i, 1)};
  auto job = std::make_shared<fp::ReadJob>(path.text, std::move(op_list), std::move(segment_list),
                                           std::move(chunk_list), options);
  if (!engine.submit(job)) throw std::runtime_error("the engine is closed");
  return Read(std::move(job), std::move(keepalive));
}

nb::object job_error(const fp::Job& job) {
  const fp::IoError& e = job.error;
  if (!job.done() || !e) return nb::none();
  const auto path = nb::steal(PyUnicode_DecodeFSDefaultAndSize(e.path.data(), static_cast<Py_ssize_t>(e.path.size())));
  return nb::make_tuple(e.code, e.op, path, e.offset, e.nbytes, e.capability);
}

nb::dict job_stats(const fp::Job& job) {
  nb::dict out;
  if (!job.done()) return out;
  const fp::JobStats& s = job.stats;
  out["engine"] = s.engine;
  out["direct"] = s.direct;
  out["reasons"] = s.reasons;
  out["open_s"] = s.open_s;
  out["transfer_s"] = s.transfer_s;
  out["sync_s"] = s.sync_s;
  out["requests"] = s.requests;
  out["resumed"] = s.resumed;
  out["buffered_nbytes"] = s.buffered_nbytes;
  out["copied_nbytes"] = s.copied_nbytes;
  return out;
}

template <typename T>
nb::bytes job_crcs(const T& job) {
  std::vector<uint32_t> crcs(job.chunks());
  for (size_t i = 0; i < crcs.size(); i++) crcs[i] = job.crc(i);
  return nb::bytes(crcs.data(), crcs.size() * sizeof(uint32_t));
}

template <typename H>
nb::class_<H> bind_job(nb::module_& m, const char* name) {
  return nb::class_<H>(m, name)
      .def_prop_ro("done", [](const H& h) { return h->done(); })
      .def(
          "wait", [](const H& h, double timeout_s) { return h->wait(timeout_s); }, NoGil(), "timeout_s"_a = -1.0)
      .def("cancel", [](const H& h) { h->cancel(); })
      .def_prop_ro("moved_nbytes", [](const H& h) { return h->moved_nbytes(); })
      .def_prop_ro("error", [](const H& h) { return job_error(*h.job); })
      .def_prop_ro("stats", [](const H& h) { return job_stats(*h.job); })
      .def("crcs", [](const H& h) { return job_crcs(*h.job); });
}

struct Owner {
  void* base;
  size_t length;
};

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> allocate(size_t nbytes) {
  fp::Mapping memory;
  const size_t unit = nbytes >= fp::kHugePage ? fp::kHugePage : fp::kPage;
  if (memory.map(nbytes, unit)) throw std::bad_alloc();
  auto* owner = new Owner;
  void* data = memory.detach(owner->base, owner->length);
  nb::capsule capsule(owner, [](void* p) noexcept {
    auto* o = static_cast<Owner*>(p);
    fp::sys::unmap_memory(o->base, o->length);
    delete o;
  });
  return {data, {nbytes}, capsule};
}

// Where a NumPy array's bytes are. The buffer protocol is several times cheaper than __array_interface__, which every
// array has, also of the types that the protocol does not know.
uint64_t address_of(nb::handle array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_STRIDED_RO) != 0) {
    PyErr_Clear();
    return nb::cast<uint64_t>(array.attr("__array_interface__")["data"][0]);
  }
  const auto address = reinterpret_cast<uint64_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

// Where each array's bytes are, as packed native uint64: the buffer protocol is ten times cheaper
// than asking NumPy.
nb::bytes addresses(nb::list arrays) {
  std::vector<uint64_t> out;
  out.reserve(nb::len(arrays));
  for (nb::handle array : arrays) {
    Py_buffer view;
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    out.push_back(reinterpret_cast<uint64_t>(view.buf));
    PyBuffer_Release(&view);
  }
  return nb::bytes(out.data(), out.size() * sizeof(uint64_t));
}

std::tuple<std::string, uint32_t, uint32_t> dio_alignment(const FsPath& path) {
  uint32_t mem = 0, offset = 0;
  fp::sys::Fd fd(fp::sys::open(path.text, O_RDONLY));
  if (!fd.valid()) return {"unknown", 0, 0};
  switch (fp::sys::dio_alignment(fd.get(), mem, offset)) {
    case fp::sys::Dio::supported:
      return {"supported", mem, offset};
    case fp::sys::Dio::unsupported:
      return {"unsupported", 0, 0};
    default:
      return {"unknown", 0, 0};
  }
}

void inject_fault(const std::string& point, uint64_t at, uint64_t times, int error, int64_t short_nbytes, bool kill) {
  if (!fp::fault::inject(point, at, times, error, short_nbytes, kill))
    throw std::invalid_argument("no fault point named " + point);
}

}  // namespace

NB_MODULE(_engine, m) {
  // Engines live until the interpreter is gone; nanobind would report them as leaks.
  nb::set_leak_warnings(false);
  // Tables are made now: a fork while another thread made them on first use would leave the child's
  // initialisation locked for ever.
  char byte = 0;
  fp::crc32c(0, &byte, 0);
  fp::crc32c_portable(0, &byte, 0);
  fp::copy_crc32c(0, &byte, &byte, 0);

  nb::class_<fp::Engine>(m, "Engine")
      .def(nb::init<>())
      .def_prop_ro("usable", &fp::Engine::usable)
      .def("release_memory", &fp::Engine::release_memory)
      .def("close", &fp::Engine::close, NoGil())
      .def("submit_write", &submit_write, "path"_a, "extents"_a, "chunk_nbytes"_a, "layouts"_a, nb::kw_only(),
           "block_bytes"_a, "queue_depth"_a, "copy_threads"_a, "io_uring"_a, "direct"_a, "dontcache"_a,
           "reuse"_a = false, "durable"_a = true, "ready_nbytes"_a = ~0ull, "spill_nbytes"_a = 0,
           "keepalive"_a = nb::none())
      .def("submit_read", &submit_read, "path"_a, "ops"_a, "segments"_a, "chunks"_a, nb::kw_only(), "block_bytes"_a,
           "queue_depth"_a, "copy_threads"_a, "io_uring"_a, "direct"_a, "dontcache"_a, "keepalive"_a = nb::none());
  bind_job<Write>(m, "WriteJob")
      .def_prop_ro("staged_nbytes", [](const Write& h) { return h->staged_nbytes(); })
      .def(
          "wait_staged", [](const Write& h, uint64_t n, double timeout_s) { return h->wait_staged(n, timeout_s); },
          NoGil(), "nbytes"_a, "timeout_s"_a = -1.0)
      .def(
          "fence", [](const Write& h, uint64_t n) { h->fence(n); }, "spill_nbytes"_a)
      .def("set_ready_nbytes", [](const Write& h, uint64_t n) { h->set_ready_nbytes(n); }, "nbytes"_a);
  bind_job<Read>(m, "ReadJob");

  m.def("allocate", &allocate, "nbytes"_a);
  m.def("address_of", &address_of, "array"_a);
  m.def("addresses", &addresses, "arrays"_a);
  // Counters in memory that several processes map; who sees a number sees all that was written before it was stored.
  m.def(
      "load_acquire",
      [](uint64_t at) { return std::atomic_ref(*reinterpret_cast<uint64_t*>(at)).load(std::memory_order_acquire); },
      "address"_a);
  m.def(
      "store_release",
      [](uint64_t at, uint64_t value) {
        std::atomic_ref(*reinterpret_cast<uint64_t*>(at)).store(value, std::memory_order_release);
      },
      "address"_a, "value"_a);
  m.def(
      "crc32c", [](nb::bytes data, uint32_t crc) { return fp::crc32c(crc, data.c_str(), data.size()); }, "data"_a,
      "crc"_a = 0);
  m.def(
      "crc32c_portable",
      [](nb::bytes data, uint32_t crc) { return fp::crc32c_portable(crc, data.c_str(), data.size()); }, "data"_a,
      "crc"_a = 0);
  m.def("crc32c_shift", &fp::crc32c_shift, "crc"_a, "nbytes"_a);
  m.def("crc32c_implementation", &fp::crc32c_implementation);

  m.def("fsync_path", [](const FsPath& path) { return -fp::sys::fsync_path(path.text); }, NoGil(), "path"_a);
  m.def("on_network", [](const FsPath& path) { return fp::sys::on_network(path.text); }, NoGil(), "path"_a);
  m.def(
      "write_file",
      [](const FsPath& path, nb::bytes data, bool durable) {
        const char* step = "";
        const nb::gil_scoped_release released;
        const int result = fp::sys::write_file(path.text, data.c_str(), data.size(), durable, step);
        return std::pair(-result, std::string(step));
      },
      "path"_a, "data"_a, "durable"_a);
  m.def(
      "mkdir", [](const FsPath& path, unsigned mode) { return -fp::sys::mkdir(path.text, mode); }, NoGil(), "path"_a,
      "mode"_a = 0777);
  m.def("unlink", [](const FsPath& path) { return -fp::sys::unlink(path.text); }, NoGil(), "path"_a);
  m.def(
      "rename",
      [](const FsPath& from, const FsPath& to, unsigned mode) { return -fp::sys::rename(from.text, to.text, mode); },
      NoGil(), "source"_a, "target"_a, "mode"_a = 0);

  m.def(
      "probe_io_uring",
      [] {
        std::string step;
        const int code = fp::probe_io_uring(step);
        return std::make_pair(code, step);
      },
      NoGil());
  m.def("dio_alignment", &dio_alignment, "path"_a);

  m.def("inject_fault", &inject_fault, "point"_a, nb::kw_only(), "at"_a = 1, "times"_a = 1, "error"_a = 0,
        "short_nbytes"_a = -1, "kill"_a = false);
  m.def("count_faults", &fp::fault::count_only);
  m.def("clear_faults", &fp::fault::clear);
  m.def("fault_counts", &fp::fault::counts);
}

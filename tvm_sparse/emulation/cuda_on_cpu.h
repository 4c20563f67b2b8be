// Runs the CUDA C++ that TVM generates on a CPU, one fiber per CUDA thread.
//
// This file is the whole "device": the language (vector types, half types, intrinsics) at the
// bottom, the machine (fibers, barriers, warp exchanges, memory checks) on top. The Python side
// (__init__.py) rewrites inline PTX into calls of cuda_on_cpu::ptx::*, compiles the result with
// this header in front, and calls cuda_on_cpu_launch from a forked child process.
//
// Principles:
//   * A fiber runs until it waits for others. Which fiber runs next is drawn from a seed, so code
//     that depends on an order which CUDA does not promise gives different results.
//   * Whatever cannot be emulated is not declared here, so that g++ rejects it by its name.
//   * Errors end the child process through fail(), with a text for the Python side.
//
// The file is compiled twice: with COC_MACHINE it is the machine, without it is the language, in
// front of the kernels and under sanitizers, which the machine must not be.
//
// Every access of the kernel is reported by g++'s -fsanitize=thread instrumentation. The hooks
// are defined here (libtsan is not linked) and look for data races between threads of a block, and
// in shared memory between those of a cluster and their bulk copies.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef COC_MACHINE
#include <deque>
#include <map>
#include <string>
#endif

#define COC_UNCHECKED __attribute__((no_sanitize("thread", "bounds", "alignment")))

// The linker delimits the section that holds the __shared__ variables of all kernels.
extern "C" char __start_cuda_shared[] __attribute__((weak));
extern "C" char __stop_cuda_shared[] __attribute__((weak));

namespace cuda_on_cpu {

struct Dim {
  unsigned x, y, z;
};

enum class State { kReady, kWarp, kActiveMask, kBarrier, kMbarrier, kCluster, kGrid, kDone };

struct Block;

// Of the machine alone.
struct Knowledge;
struct Mbarriers;

struct Thread {
  Dim idx;
  unsigned rank, warp, lane;
  Block* block;
  State state = State::kReady;
  int64_t priority = 0;
  jmp_buf context;
  ucontext_t start;
  bool started = false;
  // The collective that this thread waits for, and what it brings to it.
  const char* op = "";
  int line = 0;
  uint32_t mask = 0;
  int barrier = 0;
  uint64_t value = 0;
  // What a warp collective hands back: every participant's value, and who took part.
  uint64_t lanes[32];
  uint32_t participants = 0;
  // Vector clock over the lanes of the own warp, for the race detector.
  uint32_t clock[32];
  const Knowledge* heard = nullptr;  // what it knows through mbarriers
  bool waited_for_producer = false;
  // Cluster barriers: how many it arrived at and waited for, and the last one known to be behind
  // all threads of the cluster, also from a block barrier with one that waited.
  uint32_t arrived = 0, waited = 0, known = 0;
  // cp.async copies which were issued and not waited for yet.
  struct Copy {
    void* dst;
    const void* src;
    size_t size, filled;
    int group;
  };
  std::vector<Copy> copies;
  int group = 0;
};

// A thread that can run, beside the priority that it had when that was so: to find the highest of a thousand, nothing
// else is read.
struct Ready {
  Thread* thread;
  int64_t priority;
};

struct Barrier {
  int arrived = 0, expected = 0, true_predicates = 0;
  const Knowledge* heard = nullptr;
};

struct Block {
  Dim idx;
  std::vector<Thread> threads;
  std::vector<Ready> ready;
  Barrier barriers[16];
  uint32_t epoch = 1;  // grows at every block barrier
  unsigned alive = 0;
  int policy = 0;
  char* dynamic_shared = nullptr;
  char* saved_shared = nullptr;  // __shared__ variables while another block runs
  // Its number in the launch and its rank in the cluster, whose blocks are leader[0...].
  uint32_t number = 0, rank = 0;
  Block* leader = nullptr;
  unsigned awaited = 0;    // of the leader: threads that the cluster barrier waits for,
  uint32_t completed = 0;  // and how many cluster barriers were completed
  uint32_t known = 0;      // the most of its threads' `known`
  // Of the leader: what threads knew that arrived at a cluster barrier, and at the last completed.
  const Knowledge *gathering = nullptr, *gathered = nullptr;
  Mbarriers* mbarriers = nullptr;
  // The last cluster barrier before which a peer accessed its shared memory, plus one, and where.
  uint32_t touched = 0;
  void* touched_at = nullptr;
};

// Shadow of one byte: its last write and its last reads, for the race detector. A bulk copy
// has a thread number from kAsync on, by the mbarrier it signals, and the phase of that as its clock.
// kAtomic in the thread number says that a write was an atomic.
constexpr uint32_t kAsync = 1u << 16, kAtomic = 1u << 15;
struct Access {
  uint32_t block, thread, epoch, clock, arrived;
};
struct Shadow {
  Access write, read, read_before;  // read_before is another thread's than read
};
struct Region {
  char *begin, *end;
  char name[48];
  Shadow* shadow;
  Block* owner;  // of shared memory
};

// An array that the producer kernel writes: what it holds until that is done, and then.
struct Stale {
  char* array;
  std::vector<char> before, after;
};

// An array when a kernel began, and what its threads may have found there instead before they waited.
struct Held {
  char* array;
  std::vector<char> begun, found;
};

struct PendingWrite {
  char* address = nullptr;
  size_t size;
  char before[16];
  Access other;
  void* pc;
};

struct Machine {
  int error_fd = 2;
  uint64_t random = 1;
  const char* kernel = "";
  Dim grid, block, cluster;
  bool cooperative = false, check_races = true;
  std::vector<Block*> blocks;  // resident: a cluster, or all for a cooperative launch
  Block* loaded = nullptr;     // the block that owns the __shared__ variables
  Thread* current = nullptr;
  jmp_buf scheduler;
  void (*body)(void**) = nullptr;
  void** args = nullptr;
  size_t dynamic_shared = 0;
  char* stacks = nullptr;
  size_t stack_count = 0;
  unsigned grid_arrived = 0;
  uint32_t launch = 0;
  std::vector<Region> regions;
  PendingWrite pending;
  std::vector<Stale> stale;
  size_t unfinished = 0;  // how often threads still find the producer kernel at work; 0 when it is done
  // Of the kernel before, for one that overlaps it: what arrays held; how often its threads waited for
  // its own producer, and whether some let the consumer start before they did.
  std::vector<Held> held;
  size_t waits = 0;
  bool early = false;
};
extern Machine machine;

constexpr size_t kStack = 64 << 10, kPage = 4096;

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
void suspend();
void yield_point(bool always = false);
void await_previous();
void launch_dependents();
Thread& exchange(const char* op, int line, uint32_t mask, uint64_t value);
int block_barrier(const char* op, int line, int id, int count, bool predicate, bool wait = true);
void grid_barrier(int line);
void cluster_arrive(int line);
void cluster_wait(int line);
void copy_async(void* dst, const void* src, int size, int filled);
void wait_copies(int pending_groups);
void check_address(const void* address, size_t size);
void on_atomic(const void* address, size_t size);
void mbarrier_init(char* place, uint32_t count);
void mbarrier_arrive(char* place, uint32_t bytes, bool of_peer = false);
bool mbarrier_wait(int line, char* place, uint32_t parity);
void bulk_copy(char* dst, const char* src, uint32_t size, char* mbarrier);
void store_async(char* dst, const void* value, uint32_t size, char* mbarrier);
void bulk_prefetch(const char* src, uint32_t size);
// A tensor map of two dimensions; `child.py` makes it.
struct Matrix {
  const char* base;
  uint64_t cols, rows, pitch;
  uint32_t box_cols, box_rows, size, swizzle;
};
void box_copy(const Matrix& m, int32_t column, int32_t row, char* dst, char* mbarrier);
// Where swizzled rows have what would lie at a shared address. `swizzle`: 1 to 3 for rows of 32 to 128 bytes.
inline uint32_t swizzled(uint32_t address, uint32_t swizzle) {
  return address ^ ((address >> 7 & ((1u << swizzle) - 1)) << 4);
}
inline Thread& self() { return *machine.current; }
inline unsigned cluster_size() {
  return machine.cluster.x * machine.cluster.y * machine.cluster.z;
}

}  // namespace cuda_on_cpu

#ifdef COC_MACHINE

namespace cuda_on_cpu {

Machine machine;

// What is behind a thread through mbarriers, handed on by every kind of synchronisation: accesses by
// a thread of its cluster with a clock below `clocks`, in a block's epoch below `epochs`, before the
// cluster barrier `known`. Behind the threads, `clocks` has the mbarriers, whose clock is the number
// of their phase. Shared by those who know the same, and kept for as long as the cluster runs.
struct Knowledge {
  std::vector<uint32_t> clocks, epochs;
  uint32_t known = 0;
};
static std::deque<Knowledge> knowledge;

// An mbarrier object. Its place in shared memory holds nothing: what it is on a GPU is not for use.
struct Mbarrier {
  Block* block = nullptr;
  char* place = nullptr;  // as find_region knows it
  uint32_t number = 0;    // among those of the cluster
  int64_t expected = 0, pending = 0, bytes = 0;  // arrivals, and the transaction count
  uint32_t phase = 0;
  unsigned in_flight = 0;  // bulk copies that will complete bytes of this phase
  int64_t copied = -1;     // the last phase that a copy signalled
  Knowledge gathering;     // what those knew who arrived, or had something copied,
  const Knowledge* gathered = nullptr;  // and what one knows who waited for the phase before this
};
struct Mbarriers : std::map<char*, Mbarrier> {};
static uint32_t mbarriers_made;

// A bulk copy or an asynchronous store that has been issued and not been performed. Places are as find_region knows
// them.
struct Flight {
  char *destination, *source;
  size_t size;
  Mbarrier* mbarrier;
  Block* sender;
  std::vector<char> taken;  // of global memory and registers, what was there when it was issued
};
static std::vector<Flight> flights;
static unsigned patience;  // the steps of threads that a bulk copy takes, on average

// ---- errors ----------------------------------------------------------------------------------

void fail(const char* format, ...) {
  char text[8192];
  int n = snprintf(text, sizeof text, "kernel %s: ", machine.kernel);
  va_list list;
  va_start(list, format);
  n += vsnprintf(text + n, sizeof text - n, format, list);
  va_end(list);
  if (Thread* t = machine.current) {
    n += snprintf(text + n, sizeof text - n, "\n  in thread (%u, %u, %u) of block (%u, %u, %u)",
                  t->idx.x, t->idx.y, t->idx.z, t->block->idx.x, t->block->idx.y, t->block->idx.z);
  }
  if (n > int(sizeof text) - 1) n = sizeof text - 1;
  fflush(stdout);
  ssize_t ignored = write(machine.error_fd, text, n);
  (void)ignored;
  _exit(3);
}

static char* image_start() {
  extern char start[] __asm__("__ehdr_start") __attribute__((visibility("hidden")));
  return start;
}

// Python turns code+0x... into a line of the CUDA source with addr2line.
static unsigned long code_offset(void* pc) { return (char*)pc - image_start() - 1; }

[[noreturn]] static void report_out_of_bounds(char* address, size_t size, void* pc) {
  const Region* nearest = nullptr;
  long distance = 1 << 16;
  for (const Region& r : machine.regions) {
    long d = address < r.begin ? r.begin - address : address + size - r.end;
    if (d < distance) nearest = &r, distance = d;
  }
  if (!nearest) fail("illegal memory access at %p, code+0x%lx", (void*)address, code_offset(pc));
  if (address < nearest->begin)
    fail("out-of-bounds access %ld bytes before the start of %s, code+0x%lx", distance,
         nearest->name, code_offset(pc));
  fail("out-of-bounds access %ld bytes past the end of %s, code+0x%lx", distance, nearest->name,
       code_offset(pc));
}

static void on_signal(int number, siginfo_t* info, void* context) {
  if (number == SIGALRM) fail("timeout");
  void* pc = nullptr;
#if defined(__x86_64__)
  pc = (char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1;
#elif defined(__aarch64__)
  pc = (char*)((ucontext_t*)context)->uc_mcontext.pc + 1;
#endif
  char* address = (char*)info->si_addr;
  if (number == SIGFPE) fail("integer division by zero, code+0x%lx", code_offset(pc));
  if (machine.stacks && address >= machine.stacks &&
      address < machine.stacks + machine.stack_count * kStack)
    fail("stack overflow: local arrays of a thread exceed %zu bytes", kStack);
  report_out_of_bounds(address, 1, pc);
}

// ---- fibers and the scheduler ----------------------------------------------------------------

uint64_t random_number() {  // xorshift64*
  uint64_t& x = machine.random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  return x * 0x2545F4914F6CDD1DULL >> 16;
}

void load_shared(Block* block) {
  // All blocks share the addresses of the __shared__ variables: their contents are swapped.
  if (machine.loaded == block) return;
  size_t size = __stop_cuda_shared - __start_cuda_shared;
  if (size && machine.loaded)
    memcpy(machine.loaded->saved_shared, __start_cuda_shared, size);
  if (size) memcpy(__start_cuda_shared, block->saved_shared, size);
  machine.loaded = block;
}

static void finish_pending_write();
static void count_arrival(Block* leader);
static void perform(size_t index);
static void check_exit(Block& b);
static std::string describe(const Mbarrier& m);

void suspend() {
  finish_pending_write();
  if (_setjmp(machine.current->context) == 0) _longjmp(machine.scheduler, 1);
}

void wake(Thread& t) {
  t.state = State::kReady;
  t.block->ready.push_back({&t, t.priority});
}

// Lets another thread run first, sometimes: around atomics and polling loads.
void yield_point(bool always) {
  if (!always && random_number() % 4) return;
  Thread* t = machine.current;
  t->priority -= int64_t(1) << 40;  // a polling thread must not starve those it waits for
  t->block->ready.push_back({t, t->priority});
  suspend();
}

static void finish_copy(const Thread::Copy& c) {
  memcpy(c.dst, c.src, c.filled);
  memset((char*)c.dst + c.filled, 0, c.size - c.filled);
}

void copy_async(void* dst, const void* src, int size, int filled) {
  if (uintptr_t(dst) % size || uintptr_t(src) % size) fail("misaligned cp.async of %d bytes", size);
  check_address(dst, size);
  if (filled) check_address(src, filled);
  Thread::Copy copy{dst, src, size_t(size), size_t(filled), self().group};
  if (machine.unfinished) return finish_copy(copy);  // may well be done before the producer kernel is
  self().copies.push_back(copy);
}

// Copies of the groups but the newest are done now, not before: a missing wait reads old data.
void wait_copies(int pending_groups) {
  Thread* t = &self();
  size_t kept = 0;
  for (auto& c : t->copies) {
    if (c.group < t->group - pending_groups) {
      finish_copy(c);
    } else {
      t->copies[kept++] = c;
    }
  }
  t->copies.resize(kept);
}

// ---- the producer kernel, which an overlapping launch does not wait for ----------------------

// Every set of resident blocks starts while it runs, as if all blocks of the grid had started at
// once. In half of the cases it is done when all of their threads have come to the wait, else when
// some of them have: these, any lanes of any warps, have read what was there before, the others not.
static void begin_previous(size_t threads) {
  for (Stale& s : machine.stale) memcpy(s.array, s.before.data(), s.before.size());
  if (!machine.stale.empty()) machine.unfinished = 1 + random_number() % (2 * threads);
}

static void end_previous() {
  finish_pending_write();
  for (Stale& s : machine.stale) memcpy(s.array, s.after.data(), s.after.size());
  machine.unfinished = 0;
}

// What the blocks themselves wrote is to be there beside the next ones too.
static void keep_written() {
  for (Stale& s : machine.stale) s.after.assign(s.array, s.array + s.after.size());
}

// A consumer may start beside a kernel that has begun itself beside its producer. It may find what was
// there before the kernel in between wrote; and before its producer did, unless that was waited for.
static void follow_previous() {
  Machine& m = machine;
  bool both = m.early || !m.waits;
  for (Held& h : m.held) {
    std::vector<char> now(h.array, h.array + h.begun.size());
    std::vector<char>& before = both ? h.found : h.begun;
    if (before != now) m.stale.push_back({h.array, before, now});
  }
  m.held.clear();
  for (const Region& r : m.regions)
    if (!r.owner) m.held.push_back({r.begin, {r.begin, r.end}, {r.begin, r.end}});
  for (Held& h : m.held)
    for (Stale& s : m.stale)
      if (s.array == h.array) h.found = s.before;
  m.early = false, m.waits = 0;
}

void launch_dependents() {
  if (!self().waited_for_producer) machine.early = true;
  yield_point();
}

void await_previous() {
  self().waited_for_producer = true;
  machine.waits++;
  while (machine.unfinished > 1) {
    machine.unfinished--;
    yield_point(true);
  }
  if (machine.unfinished) end_previous();
  yield_point();
}

void thread_main() {
  machine.body(machine.args);
  finish_pending_write();
  Thread* t = machine.current;
  t->state = State::kDone;
  Block& b = *t->block;
  if (!--b.alive) check_exit(b);
  if (t->arrived == b.leader->completed) count_arrival(b.leader);
  _longjmp(machine.scheduler, 1);
}

Thread* pick(Block& b) {
  // Policy 0: any thread. 1: some warps far ahead of the others. 2: some threads far ahead.
  size_t best = random_number() % b.ready.size();
  if (b.policy)
    for (size_t i = 0; i < b.ready.size(); i++)
      if (b.ready[i].priority > b.ready[best].priority) best = i;
  Thread* t = b.ready[best].thread;
  b.ready[best] = b.ready.back();
  b.ready.pop_back();
  return t;
}

bool resolve_activemask() {
  // __activemask(): the lanes which are at the same place once none of the warp can move on.
  for (Block* b : machine.blocks)
    for (Thread& t : b->threads) {
      if (t.state != State::kActiveMask) continue;
      uint32_t mask = 0;
      unsigned first = t.warp * 32, last = std::min<unsigned>(first + 32, b->threads.size());
      for (unsigned i = first; i < last; i++) {
        Thread& o = b->threads[i];
        if (o.state == State::kActiveMask && o.line == t.line) mask |= 1u << o.lane;
      }
      for (unsigned i = first; i < last; i++)
        if (mask >> (i - first) & 1) b->threads[i].value = mask, wake(b->threads[i]);
      return true;
    }
  return false;
}

[[noreturn]] void report_deadlock() {
  machine.current = nullptr;
  char text[4096];
  int n = 0, listed = 0;
  unsigned exited = 0, waiting = 0, for_mbarriers = 0;
  for (Block* b : machine.blocks)
    for (Thread& t : b->threads) {
      if (t.state == State::kDone) {
        exited++;
        continue;
      }
      waiting++;
      for_mbarriers += t.state == State::kMbarrier;
      bool seen = false;  // one line for all threads that wait at the same place
      for (Thread& o : b->threads) {
        if (&o == &t) break;
        seen |= o.state == t.state && o.line == t.line && o.mask == t.mask && o.op == t.op &&
                (t.state != State::kMbarrier || o.value == t.value);
      }
      if (seen || ++listed > 8) continue;
      n += snprintf(text + n, sizeof text - n,
                    "\n  thread (%u, %u, %u) of block (%u, %u, %u) waits in %s", t.idx.x, t.idx.y,
                    t.idx.z, b->idx.x, b->idx.y, b->idx.z, t.op);
      if (t.state == State::kWarp) n += snprintf(text + n, sizeof text - n, " mask 0x%x", t.mask);
      n += snprintf(text + n, sizeof text - n, " at kernel.cu:%d", t.line);
      if (t.state == State::kMbarrier) {
        const Mbarrier& m = *(const Mbarrier*)t.value;
        n += snprintf(text + n, sizeof text - n, " for %s, whose phase %u awaits %ld arrivals and %ld bytes",
                      describe(m).c_str(), m.phase, long(m.pending), long(m.bytes));
      }
      if (t.state != State::kWarp) continue;
      for (unsigned i = 0; i < 32 && t.warp * 32 + i < b->threads.size(); i++) {
        Thread& o = b->threads[t.warp * 32 + i];
        if ((t.mask >> i & 1) && o.state == State::kDone) {
          n += snprintf(text + n, sizeof text - n, " (lane %u of its mask has exited)", i);
          break;
        }
      }
    }
  fail("%s: %u threads wait for ever, %u have exited%s",
       for_mbarriers ? "deadlock" : "divergent barrier or collective", waiting, exited, text);
}

void run_resident_blocks() {
  volatile unsigned alive = 0;
  for (Block* b : machine.blocks) alive += b->alive;
  while (alive) {
    size_t with_work = 0;
    for (Block* b : machine.blocks) with_work += !b->ready.empty();
    if (!flights.empty() && (!with_work || random_number() % patience == 0)) {
      perform(random_number() % flights.size());
      continue;
    }
    if (!with_work) {
      if (!resolve_activemask()) report_deadlock();
      continue;
    }
    size_t skip = random_number() % with_work;
    Block* block = nullptr;
    for (Block* b : machine.blocks)
      if (!b->ready.empty() && !skip--) {
        block = b;
        break;
      }
    load_shared(block);
    Thread* t = pick(*block);
    machine.current = t;
    if (_setjmp(machine.scheduler) == 0) {
      if (t->started) _longjmp(t->context, 1);
      t->started = true;
      setcontext(&t->start);
    }
    machine.current = nullptr;
    alive = 0;
    for (Block* b : machine.blocks) alive += b->alive;
  }
}

char* guarded(size_t size, const char* name, size_t align = 16) {
  // An allocation that ends at an unmapped page, up to rounding to `align`; never freed, since the
  // process is short-lived. Filled with 0xFF: NaN for floats, -1 for integers.
  size_t pages = (size + align + kPage - 1) / kPage + 1;
  char* map = (char*)mmap(nullptr, (pages + 2) * kPage, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) fail("cannot allocate %zu bytes for %s", size, name);
  mprotect(map, kPage, PROT_NONE);
  mprotect(map + (pages + 1) * kPage, kPage, PROT_NONE);
  char* begin = map + (pages + 1) * kPage - (size + align - 1) / align * align;
  memset(begin, 0xFF, size);
  return begin;
}

void add_region(char* begin, size_t size, const char* name, Block* owner = nullptr) {
  Region r{begin, begin + size, {}, nullptr, owner};
  snprintf(r.name, sizeof r.name, "%s", name);
  if (size)
    r.shadow = (Shadow*)mmap(nullptr, size * sizeof(Shadow), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  machine.regions.push_back(r);
}

void prepare(Block& b, unsigned cluster, unsigned rank, unsigned slot) {
  const Dim &g = machine.grid, &d = machine.block, &c = machine.cluster;
  unsigned n = d.x * d.y * d.z, across = g.x / c.x, down = g.y / c.y;
  b.idx = {cluster % across * c.x + rank % c.x, cluster / across % down * c.y + rank / c.x % c.y,
           cluster / across / down * c.z + rank / c.x / c.y};
  b.number = machine.launch + cluster * cluster_size() + rank;
  b.rank = rank, b.leader = &b - rank;
  b.awaited = n * cluster_size();
  b.completed = b.known = b.touched = 0;
  b.gathering = b.gathered = nullptr;
  if (!b.mbarriers) b.mbarriers = new Mbarriers;
  b.mbarriers->clear();
  b.threads = std::vector<Thread>(n);
  b.alive = n;
  for (Barrier& barrier : b.barriers) barrier = Barrier();
  b.policy = random_number() % 3;
  if (size_t size = __stop_cuda_shared - __start_cuda_shared) {
    if (!b.saved_shared) {
      b.saved_shared = guarded(size, "shared memory", 64);
      add_region(b.saved_shared, size, "shared memory", &b);
    }
    memset(b.saved_shared, 0xFF, size);
  }
  if (machine.dynamic_shared) {
    if (!b.dynamic_shared) {
      b.dynamic_shared = guarded(machine.dynamic_shared, "dynamic shared memory", 64);
      add_region(b.dynamic_shared, machine.dynamic_shared, "dynamic shared memory", &b);
    }
    memset(b.dynamic_shared, 0xFF, machine.dynamic_shared);
  }
  std::vector<int64_t> warp_priority((n + 31) / 32);
  for (auto& p : warp_priority) p = random_number() % (1 << 20);
  for (unsigned i = 0; i < n; i++) {
    Thread& t = b.threads[i];
    t.idx = {i % d.x, i / d.x % d.y, i / d.x / d.y};
    t.rank = i, t.warp = i / 32, t.lane = i % 32, t.block = &b;
    t.priority = b.policy == 1 ? warp_priority[t.warp] << 10 : 0;
    t.priority += random_number() % 1024;
    memset(t.clock, 0, sizeof t.clock);
    t.clock[t.lane] = 1;
    getcontext(&t.start);
    t.start.uc_stack.ss_sp = machine.stacks + (size_t(slot) * n + i) * kStack + kPage;
    t.start.uc_stack.ss_size = kStack - kPage;
    t.start.uc_link = nullptr;
    makecontext(&t.start, thread_main, 0);
    b.ready.push_back({&t, t.priority});
  }
}

// ---- what threads know through mbarriers -----------------------------------------------------

static void raise(std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

static void join(Knowledge& to, const Knowledge& from) {
  raise(to.clocks, from.clocks);
  raise(to.epochs, from.epochs);
  to.known = std::max(to.known, from.known);
}

static bool covers(const Knowledge& a, const Knowledge& b) {
  auto all = [](const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    for (size_t i = 0; i < b.size(); i++)
      if (b[i] > (i < a.size() ? a[i] : 0)) return false;
    return true;
  };
  return a.known >= b.known && all(a.clocks, b.clocks) && all(a.epochs, b.epochs);
}

// The threads of a barrier mostly know the same: what was joined last is not compared again.
static const Knowledge *last_to, *last_from, *last_joined;

static void forget_knowledge() {
  knowledge.clear();
  last_to = last_from = last_joined = nullptr;
}

static void join(const Knowledge*& to, const Knowledge* from) {
  if (!from || to == from) return;
  if (to != last_to || from != last_from) {
    last_to = to, last_from = from;
    if (to && covers(*to, *from)) {
      last_joined = to;
    } else if (!to || covers(*from, *to)) {
      last_joined = from;
    } else {
      knowledge.push_back(*to);
      join(knowledge.back(), *from);
      last_joined = &knowledge.back();
    }
  }
  to = last_joined;
}

static void acquire(Thread& t, const Knowledge* from) {
  join(t.heard, from);
  if (!t.heard) return;
  t.known = std::max(t.known, t.heard->known);
  t.block->known = std::max(t.block->known, t.known);
}

// Adds all that the thread has done and knows; what it does from now on is told apart.
static void release(Thread& t, Knowledge& to) {
  const Block& b = *t.block;
  size_t count = b.threads.size(), first = b.rank * count + t.warp * 32;
  if (t.heard) join(to, *t.heard);
  to.clocks.resize(std::max(to.clocks.size(), cluster_size() * count));
  to.epochs.resize(cluster_size());
  t.clock[t.lane]++;
  for (size_t i = 0; i < 32 && t.warp * 32 + i < count; i++)
    to.clocks[first + i] = std::max(to.clocks[first + i], t.clock[i]);
  to.epochs[b.rank] = std::max(to.epochs[b.rank], b.epoch);
  to.known = std::max(to.known, t.known);
}

static uint32_t heard_of(const Thread& t, size_t i) {
  return t.heard && i < t.heard->clocks.size() ? t.heard->clocks[i] : 0;
}

// Where the clocks of mbarriers start.
static size_t cluster_threads(const Block& b) { return cluster_size() * b.threads.size(); }

// ---- collectives -----------------------------------------------------------------------------

// Every warp collective is one exchange: all lanes of `mask` bring a value and get all values. Of them
// __syncwarp alone orders memory.
// Lanes which do not exist because the block is no multiple of 32 are not waited for: each TIRx
// kernel starts with a full-mask shuffle, whatever its block size.
Thread& exchange(const char* op, int line, uint32_t mask, uint64_t value) {
  Thread& t = self();
  if (!(mask >> t.lane & 1))
    fail("%s at kernel.cu:%d: lane %u is not in its own mask 0x%x", op, line, t.lane, mask);
  t.op = op, t.line = line, t.mask = mask, t.value = value, t.state = State::kWarp;
  std::vector<Thread>& threads = t.block->threads;
  unsigned first = t.warp * 32;
  unsigned count = std::min<unsigned>(32, threads.size() - first);
  if (count < 32) mask &= (1u << count) - 1;
  bool complete = true;
  for (unsigned i = 0; i < count && complete; i++) {
    Thread& o = threads[first + i];
    if (mask >> i & 1)
      complete = o.state == State::kWarp && o.mask == t.mask && (o.op == op || strcmp(o.op, op) == 0);
  }
  if (complete) {
    uint32_t joined[32] = {};
    uint64_t values[32];
    const Knowledge* heard = nullptr;
    bool orders = strcmp(op, "__syncwarp") == 0;
    memset(values, 0xFF, sizeof values);  // lanes that take no part have an undefined value
    for (unsigned i = 0; i < count; i++)
      if (mask >> i & 1) {
        Thread& o = threads[first + i];
        values[i] = o.value;
        if (!orders) continue;
        o.clock[i]++;
        for (unsigned k = 0; k < 32; k++) joined[k] = std::max(joined[k], o.clock[k]);
        join(heard, o.heard);
      }
    for (unsigned i = 0; i < count; i++)
      if (mask >> i & 1) {
        Thread& o = threads[first + i];
        memcpy(o.lanes, values, sizeof values);
        if (orders) {
          memcpy(o.clock, joined, sizeof joined);
          acquire(o, heard);
        }
        o.participants = mask;
        wake(o);
      }
  }
  suspend();
  return t;
}

// Returns the number of threads with a true predicate. `count` 0 means the whole block.
int block_barrier(const char* op, int line, int id, int count, bool predicate,
                                       bool wait) {
  Thread& t = self();
  Block& b = *t.block;
  if (id < 0 || id > 15) fail("%s at kernel.cu:%d: barrier %d does not exist", op, line, id);
  int expected = count ? count : b.threads.size();
  Barrier& barrier = b.barriers[id];
  if (barrier.arrived && barrier.expected != expected)
    fail("%s at kernel.cu:%d: barrier %d awaits %d threads, not %d", op, line, id,
         barrier.expected, expected);
  barrier.expected = expected;
  barrier.arrived++;
  barrier.true_predicates += predicate;
  join(barrier.heard, t.heard);
  t.op = op, t.line = line, t.mask = 0, t.barrier = id;
  if (wait) {
    t.state = State::kBarrier;
    // __syncthreads is bar.sync: a warp has to execute it as one.
    for (unsigned i = t.warp * 32; i < t.warp * 32 + 32 && i < b.threads.size(); i++) {
      Thread& o = b.threads[i];
      if (o.state == State::kBarrier && (o.barrier != id || o.line != line))
        fail("divergent barrier: threads of one warp wait at kernel.cu:%d and at kernel.cu:%d",
             o.line, line);
    }
  }
  if (barrier.arrived == expected) {
    for (Thread& o : b.threads)
      if (o.state == State::kBarrier && o.barrier == id) {
        o.value = barrier.true_predicates;
        o.known = b.known;
        acquire(o, barrier.heard);
        wake(o);
      }
    barrier = Barrier();
    b.epoch++;
  }
  if (!wait) return 0;
  suspend();
  return int(t.value);
}

void grid_barrier(int line) {
  if (!machine.cooperative) fail("grid barrier at kernel.cu:%d needs a cooperative launch", line);
  Thread& t = self();
  t.op = "grid.sync", t.line = line, t.state = State::kGrid;
  unsigned total = 0;
  for (Block* b : machine.blocks) total += b->threads.size();
  if (++machine.grid_arrived == total) {
    machine.grid_arrived = 0;
    for (Block* b : machine.blocks) {
      b->epoch++;
      const Knowledge* heard = nullptr;
      for (Thread& o : b->threads) join(heard, o.heard);
      for (Thread& o : b->threads) {
        acquire(o, heard);
        if (o.state == State::kGrid) wake(o);
      }
    }
  }
  suspend();
}

// The cluster barrier needs all threads of all blocks of the cluster that have not exited.
static void count_arrival(Block* leader) {
  if (--leader->awaited) return;
  leader->completed++;
  leader->gathered = leader->gathering;
  for (unsigned r = 0; r < cluster_size(); r++) {
    leader->awaited += leader[r].alive;
    for (Thread& o : leader[r].threads)
      if (o.state == State::kCluster) wake(o);
  }
}

void cluster_arrive(int line) {
  Thread& t = self();
  if (t.arrived != t.waited)
    fail("barrier.cluster.arrive at kernel.cu:%d: the thread has not waited since the last", line);
  finish_pending_write();
  t.arrived++;
  join(t.block->leader->gathering, t.heard);
  count_arrival(t.block->leader);
  yield_point();
}

void cluster_wait(int line) {
  Thread& t = self();
  if (t.arrived == t.waited)
    fail("barrier.cluster.wait at kernel.cu:%d: the thread has not arrived", line);
  t.op = "barrier.cluster.wait", t.line = line, t.mask = 0;
  if (t.block->leader->completed < t.arrived) {
    t.state = State::kCluster;
    suspend();
  }
  t.waited = t.known = t.arrived;
  t.block->known = std::max(t.block->known, t.known);
  acquire(t, t.block->leader->gathered);
}

// ---- race detector ---------------------------------------------------------------------------

// Each block has a shadow of its own for the __shared__ variables, though not their addresses.
static char* home(char* address) {
  if (address < __start_cuda_shared || address >= __stop_cuda_shared) return address;
  return self().block->saved_shared + (address - __start_cuda_shared);
}

static Region* find_region(char* address, size_t size) {
  address = home(address);
  auto within = [&](const Region& r) { return address >= r.begin && address + size <= r.end; };
  static size_t seen[1024];  // mostly, it is the one of the access before to that page
  size_t& last = seen[uintptr_t(address) / kPage % 1024];
  if (last < machine.regions.size() && within(machine.regions[last])) return &machine.regions[last];
  for (size_t i = 0; i < machine.regions.size(); i++)
    if (within(machine.regions[i])) return &machine.regions[last = i];
  return nullptr;
}

// The shared memory of a peer is there from a cluster barrier on, and has to stay until another, or
// until it has `awaited` the access itself.
static void check_peer(const Region& r, void* pc, bool awaited = false) {
  const Thread& t = self();
  if (!r.owner || r.owner == t.block) return;
  const Dim& i = r.owner->idx;
  if (!r.owner->alive)
    fail("access to %s of block (%u, %u, %u), which has exited, code+0x%lx", r.name, i.x, i.y, i.z,
         code_offset(pc));
  if (!t.known && machine.check_races)
    fail("access to %s of block (%u, %u, %u), which may not have started: no cluster barrier before, "
         "code+0x%lx", r.name, i.x, i.y, i.z, code_offset(pc));
  if (awaited) return;
  r.owner->touched = std::max(r.owner->touched, t.arrived + 1);
  r.owner->touched_at = pc;
}

// Two accesses of different threads of one block to one byte, one of them a write, are a race
// unless a barrier (or, within a warp, a __syncwarp that both lanes took part in) is between.
// Atomics of shared memory are writes that are no race with each other; those of global memory and
// ptx loads and stores with volatile, acquire... are not looked at, nor is ordering through any of
// them known. Threads of different blocks are compared only if these are of one cluster,
// and only in its shared memory: the cluster barrier has to be between. An mbarrier orders what is
// before an arrival, and bulk copies, before what is behind a wait for that phase.
bool ordered(const Access& before, const Thread& t, bool shared) {
  const Block& b = *t.block;
  uint32_t rank = before.block - b.leader->number, thread = before.thread & ~kAtomic;
  if (before.epoch == 0 || rank >= cluster_size() || (rank != b.rank && !shared)) return true;
  if (thread >= kAsync)
    return heard_of(t, cluster_threads(b) + thread - kAsync) > before.clock;
  if (t.known > before.arrived || heard_of(t, rank * b.threads.size() + thread) > before.clock)
    return true;
  if (rank != b.rank) return t.heard && before.epoch < t.heard->epochs[rank];
  if (thread == t.rank || before.epoch < b.epoch) return true;
  return thread / 32 == t.warp && t.clock[thread % 32] > before.clock;
}

[[noreturn]] void report_race(const char* what, char* address, Access other,
                                                   void* pc) {
  const Region& r = *find_region(address, 1);
  const Dim& d = machine.block;
  const Block* b = self().block;
  Dim idx = b->leader[other.block - b->leader->number].idx;
  if (other.thread >= kAsync) {
    std::string where = "an mbarrier";
    for (unsigned i = 0; i < cluster_size(); i++)
      for (const auto& [place, m] : *b->leader[i].mbarriers)
        if (other.thread == kAsync + m.number) where = describe(m);
    fail("data race: %s byte %ld of %s, code+0x%lx; the other is a bulk copy of phase %u of %s, "
         "which the thread has not awaited", what, long(home(address) - r.begin), r.name, code_offset(pc),
         other.clock, where.c_str());
  }
  uint32_t thread = other.thread & ~kAtomic;
  fail("data race: %s byte %ld of %s, code+0x%lx; the other is %sthread (%u, %u, %u) of block "
       "(%u, %u, %u), with no barrier between", what, long(home(address) - r.begin), r.name,
       code_offset(pc), thread != other.thread ? "an atomic of " : "", thread % d.x,
       thread / d.x % d.y, thread / d.x / d.y, idx.x, idx.y, idx.z);
}

static void finish_pending_write() {
  // Threads may write the same value to one place (all of them clearing a flag): benign.
  PendingWrite& p = machine.pending;
  if (!p.address) return;
  char* address = p.address;
  p.address = nullptr;
  for (size_t i = 0; i < p.size; i++)
    if (address[i] != p.before[i])
      report_race("two threads write different values to", address + i, p.other, p.pc);
}

static bool within_stack(const Thread& t, const char* address, size_t size) {
  const char* stack = (const char*)t.start.uc_stack.ss_sp;
  return address >= stack && address + size <= stack + t.start.uc_stack.ss_size;
}

// Beside the arrays, a kernel touches its stack, constants of the library, and (through threadIdx
// and the like) the machine. All else is out of bounds, whether or not the page is mapped.
static void check_elsewhere(char* address, size_t size, void* pc) {
  extern char image_end[] __asm__("_end");  // of this library: it is linked with -Bsymbolic
  Thread* t = machine.current;
  auto within = [&](const void* begin, size_t length) {
    return address >= (const char*)begin && address + size <= (const char*)begin + length;
  };
  if (within_stack(*t, address, size)) return;
  if (within(t->block->threads.data(), t->block->threads.size() * sizeof(Thread))) return;
  if (within(t->block, sizeof(Block))) return;
  if (within(image_start(), image_end - image_start()) && !find_region(address, 1)) return;
  report_out_of_bounds(address, size, pc);
}

static void refuse_mbarriers(const Region& r, char* address, size_t size, void* pc) {
  if (!r.owner || r.owner->mbarriers->empty()) return;
  auto behind = r.owner->mbarriers->lower_bound(home(address) + size);
  if (behind == r.owner->mbarriers->begin()) return;
  const auto& [place, m] = *std::prev(behind);
  if (place + 8 > home(address))
    fail("access to %s by no mbarrier instruction, code+0x%lx", describe(m).c_str(), code_offset(pc));
}

void check_address(const void* address, size_t size) {
  void* pc = __builtin_return_address(0);
  Region* found = find_region((char*)address, size);
  if (!found) return check_elsewhere((char*)address, size, pc);
  check_peer(*found, pc);
  refuse_mbarriers(*found, (char*)address, size, pc);
  if (!machine.check_races || !found->owner || found->owner->mbarriers->empty()) return;
  Shadow* shadow = found->shadow + (home((char*)address) - found->begin);
  for (size_t i = 0; i < size; i++)  // not even atomics may touch what is in flight
    if (shadow[i].write.thread >= kAsync && !ordered(shadow[i].write, self(), true))
      report_race("a thread accesses what another wrote,", (char*)address + i, shadow[i].write, pc);
}

static Access access_of(const Thread& t) {
  return {t.block->number, t.rank, t.block->epoch, t.clock[t.lane], t.arrived};
}

// What the current thread does, `now`, or has a bulk copy do. `strict`: not even a write of
// what is there already is benign.
static void look_for_races(const Region& r, char* address, size_t size, bool is_write, bool strict,
                           const Access& now, void* pc) {
  if (!machine.check_races) return;
  const Thread& t = self();
  Shadow* shadow = r.shadow + (home(address) - r.begin);
  bool shared = r.owner, async = now.thread >= kAsync;
  for (size_t i = 0; i < size; i++) {
    Shadow& s = shadow[i];
    if (!is_write) {
      if (!ordered(s.write, t, shared))
        report_race(async ? "a bulk copy reads what another wrote," : "a thread reads what another wrote,",
                    address + i, s.write, pc);
      if (s.read.thread != now.thread || s.read.block != now.block) s.read_before = s.read;
      s.read = now;
      continue;
    }
    for (const Access& read : {s.read, s.read_before})
      if (!ordered(read, t, shared))
        report_race(async ? "a bulk copy writes what another read," : "a thread writes what another read,",
                    address + i, read, pc);
    if (!ordered(s.write, t, shared)) {
      if (strict || s.write.thread >= kAtomic)
        report_race(async ? "a bulk copy writes what another wrote," : "a thread writes what another wrote,",
                    address + i, s.write, pc);
      if (!machine.pending.address && size <= 16) {
        PendingWrite& p = machine.pending;
        p.address = address, p.size = size, p.other = s.write, p.pc = pc;
        memcpy(p.before, address, size);
      }
    }
    s.write = now;
  }
}

void on_atomic(const void* place, size_t size) {
  void* pc = __builtin_return_address(0);
  char* address = (char*)place;
  finish_pending_write();
  Region* r = find_region(address, size);
  if (!r || !r->owner || !machine.check_races) return;
  const Thread& t = self();
  Access now = access_of(t);
  now.thread |= kAtomic;
  Shadow* shadow = r->shadow + (home(address) - r->begin);
  for (size_t i = 0; i < size; i++) {
    Shadow& s = shadow[i];
    bool atomic = s.write.thread < kAsync && s.write.thread & kAtomic;
    if (!atomic && !ordered(s.write, t, true))
      report_race("an atomic changes what another wrote,", address + i, s.write, pc);
    for (const Access& read : {s.read, s.read_before})
      if (!ordered(read, t, true))
        report_race("an atomic changes what another read,", address + i, read, pc);
    s.write = now;
  }
}

void on_access(char* address, size_t size, bool is_write, void* pc) {
  Thread* t = machine.current;
  if (!t) return;
  finish_pending_write();
  if (within_stack(*t, address, size)) return;
  Region* found = find_region(address, size);
  if (!found) return check_elsewhere(address, size, pc);
  check_peer(*found, pc);
  refuse_mbarriers(*found, address, size, pc);
  look_for_races(*found, address, size, is_write, false, access_of(*t), pc);
}

// ---- mbarriers and bulk copies -------------------------------------------------------

constexpr int64_t kMostOfMbarrier = (1 << 20) - 1;  // arrivals, and bytes

static std::string describe(const Mbarrier& m) {
  const Region& r = *find_region(m.place, 8);
  const Dim& i = m.block->idx;
  char text[128];
  snprintf(text, sizeof text, "the mbarrier at byte %ld of %s of block (%u, %u, %u)", long(m.place - r.begin), r.name,
           i.x, i.y, i.z);
  return text;
}

static Region& region_of_mbarrier(const char* op, char* place, bool own, void* pc) {
  finish_pending_write();
  if (uintptr_t(place) % 8) fail("%s on a misaligned mbarrier", op);
  Region* r = find_region(place, 8);
  if (!r) report_out_of_bounds(place, 8, pc);
  if (!r->owner) fail("%s on %s, and an mbarrier is in shared memory", op, r->name);
  if (own && r->owner != self().block) fail("%s on the mbarrier of a peer", op);
  check_peer(*r, pc, true);
  return *r;
}

static Mbarrier& mbarrier_at(const char* op, const Region& r, char* place) {
  auto found = r.owner->mbarriers->find(home(place));
  if (found == r.owner->mbarriers->end())
    fail("%s on byte %ld of %s, which is not initialised as an mbarrier", op, long(home(place) - r.begin), r.name);
  return found->second;
}

// The use of an mbarrier counts as a read of it, as which it is ordered behind the initialisation.
static Mbarrier& use(const char* op, char* place, void* pc, bool own = true) {
  const Region& r = region_of_mbarrier(op, place, own, pc);
  Mbarrier& m = mbarrier_at(op, r, place);
  look_for_races(r, place, 8, false, false, access_of(self()), pc);
  return m;
}

// What comes from peers has to find the block and its mbarriers, and what it sends to be read.
static void check_exit(Block& b) {
  for (const auto& [place, m] : *b.mbarriers) {
    if (m.in_flight)
      fail("the block exits with %u bulk copies in flight, which signal %s", m.in_flight, describe(m).c_str());
    if (m.bytes) fail("the block exits while %s awaits %ld bytes", describe(m).c_str(), long(m.bytes));
    auto has_waited = [&, &m = m](const Thread& t) { return heard_of(t, cluster_threads(b) + m.number) > m.copied; };
    if (m.copied >= 0 && machine.check_races && std::none_of(b.threads.begin(), b.threads.end(), has_waited))
      fail("the block exits with no wait for phase %ld of %s, which bulk copies signal", long(m.copied),
           describe(m).c_str());
  }
  if (b.touched > b.known && machine.check_races)
    fail("the block exits with no cluster barrier after a peer's access to its shared memory, "
         "code+0x%lx", code_offset(b.touched_at));
}

// Completes the phase if nothing is missing.
static void complete(Mbarrier& m) {
  if (m.pending || m.bytes > 0) return;
  if (m.bytes < 0)
    fail("phase %u of %s gets %ld bytes more than it expects", m.phase, describe(m).c_str(), -long(m.bytes));
  if (m.in_flight)
    fail("phase %u of %s completes without %u bulk copies in flight, whose bytes it does not expect",
         m.phase, describe(m).c_str(), m.in_flight);
  m.phase++;
  m.pending = m.expected;
  size_t clock = cluster_threads(*m.block) + m.number;
  m.gathering.clocks.resize(std::max(m.gathering.clocks.size(), clock + 1));
  m.gathering.clocks[clock] = m.phase;
  m.gathering.epochs.resize(cluster_size());
  knowledge.push_back(m.gathering);
  m.gathered = &knowledge.back();
  for (Thread& o : m.block->threads)
    if (o.state == State::kMbarrier && o.value == uint64_t(&m)) wake(o);
}

static void add_bytes(Mbarrier& m, int64_t bytes) {
  m.bytes += bytes;
  if (m.bytes > kMostOfMbarrier || m.bytes < -kMostOfMbarrier)
    fail("the transaction count of %s is %ld, beyond its range", describe(m).c_str(), long(m.bytes));
}

void mbarrier_init(char* place, uint32_t count) {
  void* pc = __builtin_return_address(0);
  Region& r = region_of_mbarrier("mbarrier.init", place, true, pc);
  if (count < 1 || count > kMostOfMbarrier) fail("mbarrier.init for %u arrivals", count);
  look_for_races(r, place, 8, true, true, access_of(self()), pc);
  Block& b = *r.owner;
  auto [added, is_new] = b.mbarriers->try_emplace(home(place));
  Mbarrier& m = added->second;
  if (!is_new) fail("mbarrier.init of %s, which is initialised already", describe(m).c_str());
  m.block = &b, m.place = home(place), m.number = mbarriers_made++;
  m.expected = m.pending = count;
}

void mbarrier_arrive(char* place, uint32_t bytes, bool of_peer) {
  Mbarrier& m = use("mbarrier.arrive", place, __builtin_return_address(0), !of_peer);
  add_bytes(m, bytes);
  if (!m.pending) fail("mbarrier.arrive at %s, whose phase %u awaits no arrival", describe(m).c_str(), m.phase);
  release(self(), m.gathering);
  m.pending--;
  complete(m);
  yield_point();
}

// It blocks, except when it has waited for long enough, which is for the seed to say.
bool mbarrier_wait(int line, char* place, uint32_t parity) {
  const char* op = "mbarrier.try_wait";
  void* pc = __builtin_return_address(0);
  Mbarrier& m = use(op, place, pc);
  Thread& t = self();
  auto is_over = [&] { return (m.phase & 1) != parity; };
  if (parity > 1) fail("%s for parity %u", op, parity);
  if (!is_over()) {
    if (random_number() % 4) {
      t.op = op, t.line = line, t.mask = 0, t.value = uint64_t(&m), t.state = State::kMbarrier;
      suspend();
    } else {
      yield_point(true);
    }
  }
  if (!is_over()) return false;
  acquire(t, m.gathered);
  return true;
}

// Where a place in shared memory, as find_region knows it, is now.
static char* whereabouts(const Block* b, char* place) {
  size_t size = __stop_cuda_shared - __start_cuda_shared;
  bool swapped = machine.loaded == b && place >= b->saved_shared && place < b->saved_shared + size;
  return swapped ? __start_cuda_shared + (place - b->saved_shared) : place;
}

// What writes to shared memory on its own: a bulk copy, or a store that is asynchronous.
struct Departure {
  const char* op;
  void* pc;
  Mbarrier& m;
  Access now;
};

static Departure depart(const char* op, char* mbarrier, void* pc) {
  Thread& t = self();
  const Region& where = region_of_mbarrier(op, mbarrier, false, pc);
  Mbarrier& m = mbarrier_at(op, where, mbarrier);
  Access now{t.block->number, kAsync + m.number, t.block->epoch, m.phase, 0};
  look_for_races(where, mbarrier, 8, false, false, now, pc);
  return {op, pc, m, now};
}

// Until it is performed, what it will write is poisoned, and from now on nobody's who has not waited. It comes after
// all that its thread has done and knows, so who waits for it knows that, too.
static void fly(const Departure& d, char* dst, const char* src, uint32_t size, std::vector<char> taken) {
  Thread& t = self();
  Mbarrier& m = d.m;
  Region* to = find_region(dst, size);
  if (!to) fail("%s of %u bytes to what is not all shared memory, code+0x%lx", d.op, size, code_offset(d.pc));
  if (to->owner != m.block) fail("%s to %s, which is not where %s is", d.op, to->name, describe(m).c_str());
  refuse_mbarriers(*to, dst, size, d.pc);
  look_for_races(*to, dst, size, true, true, d.now, d.pc);
  memset(dst, 0xFF, size);
  m.in_flight++;
  m.copied = m.phase;
  release(t, m.gathering);
  if (flights.empty()) {
    unsigned threads = cluster_threads(*m.block), of_these[] = {2, 2 * threads, 32 * threads};
    patience = of_these[random_number() % 3];
  }
  flights.push_back({home(dst), src ? home((char*)src) : nullptr, size, &m, t.block, std::move(taken)});
  yield_point();
}

// It reads the block's shared memory when it is performed, and global memory, which another kernel may still write, at
// once.
void bulk_copy(char* dst, const char* src, uint32_t size, char* mbarrier) {
  Thread& t = self();
  Departure d = depart("cp.async.bulk", mbarrier, __builtin_return_address(0));
  if (size % 16) fail("%s of %u bytes, which is no multiple of 16", d.op, size);
  if (uintptr_t(dst) % 16 || uintptr_t(src) % 16) fail("misaligned %s", d.op);
  Region* from = find_region((char*)src, size);
  if (!from) report_out_of_bounds((char*)src, size, d.pc);
  if (from->owner && from->owner != t.block) fail("%s from %s, not from the block's shared memory", d.op, from->name);
  refuse_mbarriers(*from, (char*)src, size, d.pc);
  look_for_races(*from, (char*)src, size, false, false, d.now, d.pc);
  if (from->owner) {
    t.block->touched = std::max(t.block->touched, t.arrived + 1);
    t.block->touched_at = d.pc;
  }
  fly(d, dst, src, size, from->owner ? std::vector<char>() : std::vector<char>(src, src + size));
}

// A box of a matrix: zeros beyond it. It goes to dynamic shared memory, where addresses say how it is swizzled.
void box_copy(const Matrix& matrix, int32_t column, int32_t row, char* dst, char* mbarrier) {
  Departure d = depart("cp.async.bulk.tensor", mbarrier, __builtin_return_address(0));
  uint32_t wide = matrix.box_cols * matrix.size, size = matrix.box_rows * wide;
  uint32_t start = dst - d.m.block->dynamic_shared;
  if (start % (8 * wide)) fail("%s to byte %u of dynamic shared memory, no multiple of eight swizzled rows", d.op, start);
  std::vector<char> taken(size);
  for (uint32_t r = 0; r < matrix.box_rows; r++)
    for (uint32_t c = 0; c < matrix.box_cols; c++) {
      int64_t from_row = int64_t(row) + r, from_column = int64_t(column) + c;
      if (from_row < 0 || from_row >= int64_t(matrix.rows) || from_column < 0 || from_column >= int64_t(matrix.cols))
        continue;
      char* src = (char*)matrix.base + from_row * matrix.pitch + from_column * matrix.size;
      Region* from = find_region(src, matrix.size);
      if (!from) report_out_of_bounds(src, matrix.size, d.pc);
      look_for_races(*from, src, matrix.size, false, false, d.now, d.pc);
      memcpy(&taken[swizzled(start + r * wide + c * matrix.size, matrix.swizzle) - start], src, matrix.size);
    }
  fly(d, dst, nullptr, size, std::move(taken));
}

void store_async(char* dst, const void* value, uint32_t size, char* mbarrier) {
  Departure d = depart("st.async", mbarrier, __builtin_return_address(0));
  if (uintptr_t(dst) % size) fail("misaligned %s", d.op);
  const char* bytes = (const char*)value;
  fly(d, dst, nullptr, size, std::vector<char>(bytes, bytes + size));
}

// A hint, but one that should be about something.
void bulk_prefetch(const char* src, uint32_t size) {
  void* pc = __builtin_return_address(0);
  if (size % 16 || uintptr_t(src) % 16) fail("cp.async.bulk.prefetch of %u bytes from %p: no whole vectors", size, src);
  if (!find_region((char*)src, size)) report_out_of_bounds((char*)src, size, pc);
}

static void perform(size_t index) {
  std::swap(flights[index], flights.back());
  Flight flight = std::move(flights.back());
  flights.pop_back();
  Mbarrier& m = *flight.mbarrier;
  const char* source = flight.taken.empty() ? whereabouts(flight.sender, flight.source) : flight.taken.data();
  memcpy(whereabouts(m.block, flight.destination), source, flight.size);
  m.in_flight--;
  add_bytes(m, -int64_t(flight.size));
  complete(m);
}

}  // namespace cuda_on_cpu

// ---- entry points for Python -----------------------------------------------------------------

extern "C" {
void cuda_on_cpu_init(int error_fd, uint64_t seed, bool check_races, double timeout) {
  using namespace cuda_on_cpu;
  machine.error_fd = error_fd;
  machine.check_races = check_races;
  machine.random = (seed + 1) * 0x9E3779B97F4A7C15ULL;
  machine.kernel = "(host)";
  static char alternate[64 << 10];
  stack_t stack{};
  stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
  sigaltstack(&stack, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM}) sigaction(s, &action, nullptr);
  itimerval timer{};
  timer.it_value.tv_sec = long(timeout);
  timer.it_value.tv_usec = long((timeout - long(timeout)) * 1e6);
  setitimer(ITIMER_REAL, &timer, nullptr);
}

void cuda_on_cpu_region(void* begin, size_t size, const char* name) {
  cuda_on_cpu::add_region((char*)begin, size, name);
}

// Until the producer kernel is done, `array` holds the bytes at `before`.
void cuda_on_cpu_stale(char* array, const char* before, size_t size) {
  cuda_on_cpu::machine.stale.push_back({array, {before, before + size}, {array, array + size}});
}

// Global workspaces between the kernels of one host function.
void* cuda_on_cpu_alloc(size_t size) {
  char* p = cuda_on_cpu::guarded(size, "a workspace");
  cuda_on_cpu::add_region(p, size, "a workspace");
  return p;
}

void cuda_on_cpu_run(const char* name, void (*body)(void**), void** args, const unsigned* dims,
                     size_t dynamic_shared, bool cooperative, bool overlapping) {
  using namespace cuda_on_cpu;
  Machine& m = machine;
  m.kernel = name, m.body = body, m.args = args;
  m.grid = {dims[0], dims[1], dims[2]};
  m.block = {dims[3], dims[4], dims[5]};
  m.cluster = {dims[6], dims[7], dims[8]};
  m.dynamic_shared = dynamic_shared;
  m.cooperative = cooperative;
  size_t threads = size_t(dims[3]) * dims[4] * dims[5];
  size_t blocks = size_t(dims[0]) * dims[1] * dims[2];
  if (threads == 0 || threads > 1024) fail("a block of %zu threads", threads);
  if (blocks == 0) fail("an empty grid (cuLaunchKernel returns invalid value)");
  size_t cluster = cluster_size();
  if (cluster == 0 || cluster > 16) fail("a cluster of %zu blocks", cluster);
  for (int i = 0; i < 3; i++)
    if (dims[i] % dims[6 + i])
      fail("a grid of %u blocks is no whole number of clusters of %u", dims[i], dims[6 + i]);
  size_t slots = cooperative ? blocks : cluster;
  if (m.stack_count < slots * threads) {
    m.stack_count = slots * threads;
    m.stacks = (char*)mmap(nullptr, m.stack_count * kStack, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m.stacks == MAP_FAILED) fail("cannot allocate %zu stacks", m.stack_count);
    if (m.stack_count <= 8192)  // each guard page costs a mapping, and those are limited
      for (size_t i = 0; i < m.stack_count; i++) mprotect(m.stacks + i * kStack, kPage, PROT_NONE);
  }
  std::vector<unsigned> order(blocks / cluster);
  for (size_t i = 0; i < order.size(); i++) {
    size_t j = random_number() % (i + 1);
    order[i] = order[j], order[j] = i;
  }
  if (overlapping) follow_previous();
  else m.stale.clear(), m.held.clear();
  std::vector<Block> resident(slots);
  for (size_t next = 0; next < blocks; next += slots) {
    m.blocks.clear();
    m.loaded = nullptr;
    forget_knowledge();
    mbarriers_made = 0;
    for (size_t s = 0; s < slots; s++) {
      prepare(resident[s], order[(next + s) / cluster], (next + s) % cluster, s);
      m.blocks.push_back(&resident[s]);
    }
    begin_previous(slots * threads);
    run_resident_blocks();
    if (m.unfinished) end_previous();  // none of them has waited
    keep_written();
  }
  m.stale.clear();
  // Shared memory is left mapped; its regions are not.
  m.regions.erase(std::remove_if(m.regions.begin(), m.regions.end(),
                                 [](const Region& r) { return r.owner; }), m.regions.end());
  m.blocks.clear();
  m.launch += blocks;
  m.kernel = "(host)";
}

// Hooks of -fsanitize=thread.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define COC_HOOKS(N)                                                         \
  void __tsan_read##N(void* p) {                                             \
    cuda_on_cpu::on_access((char*)p, N, false, __builtin_return_address(0)); \
  }                                                                          \
  void __tsan_write##N(void* p) {                                            \
    cuda_on_cpu::on_access((char*)p, N, true, __builtin_return_address(0));  \
  }                                                                          \
  void __tsan_unaligned_read##N(void* p) {                                   \
    cuda_on_cpu::on_access((char*)p, N, false, __builtin_return_address(0)); \
  }                                                                          \
  void __tsan_unaligned_write##N(void* p) {                                  \
    cuda_on_cpu::on_access((char*)p, N, true, __builtin_return_address(0));  \
  }
COC_HOOKS(1)
COC_HOOKS(2)
COC_HOOKS(4)
COC_HOOKS(8)
COC_HOOKS(16)
#undef COC_HOOKS
void __tsan_read_range(void* p, unsigned long n) {
  cuda_on_cpu::on_access((char*)p, n, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long n) {
  cuda_on_cpu::on_access((char*)p, n, true, __builtin_return_address(0));
}

// Hooks of -fsanitize=bounds,alignment: each report starts with the place in the source.
struct CocPlace {
  const char* file;
  uint32_t line, column;
};
void __ubsan_handle_out_of_bounds_abort(CocPlace* at, uint64_t index) {
  cuda_on_cpu::fail("index %ld is out of the bounds of a shared or local array, kernel.cu:%u",
                    long(index), at->line);
}
void __ubsan_handle_type_mismatch_v1_abort(CocPlace* at, uint64_t p) {
  cuda_on_cpu::fail("misaligned vector access to 0x%lx, kernel.cu:%u", (unsigned long)p, at->line);
}
}  // extern "C"

#else  // not COC_MACHINE

namespace cuda_on_cpu {

// ---- memory operations of the device ---------------------------------------------------------

template <class T>
COC_UNCHECKED inline T raw_load(const void* p) {
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
COC_UNCHECKED inline void raw_store(void* p, T v) {
  memcpy(p, &v, sizeof v);
}
template <class T, class F>
COC_UNCHECKED inline T atomic(T* address, F change) {
  yield_point();
  check_address(address, sizeof(T));
  on_atomic(address, sizeof(T));
  if (uintptr_t(address) % sizeof(T)) fail("atomic on the misaligned address %p", (void*)address);
  T old = raw_load<T>(address);
  raw_store<T>(address, change(old));
  return old;
}

// Shared addresses in PTX are 32-bit offsets; dynamic shared memory gets its own range. Those of a
// peer, which only .shared::cluster instructions take, are marked with its rank plus one.
constexpr uint32_t kDynamicShared = 1u << 24, kPeer = kDynamicShared << 1;
COC_UNCHECKED inline uint32_t shared_address(const void* p) {
  char* c = (char*)p;
  if (c >= __start_cuda_shared && c < __stop_cuda_shared) return c - __start_cuda_shared;
  char* dynamic = self().block->dynamic_shared;
  if (dynamic && c >= dynamic && c <= dynamic + machine.dynamic_shared)
    return kDynamicShared + (c - dynamic);
  fail("address %p is not in shared memory", p);
}
COC_UNCHECKED inline void* generic(uint32_t shared) {
  if (shared >= kPeer) fail("the address of a peer's shared memory where that of the own is due");
  if (shared >= kDynamicShared) return self().block->dynamic_shared + (shared - kDynamicShared);
  return __start_cuda_shared + shared;
}
COC_UNCHECKED inline void* generic(const void* p) { return (void*)p; }
COC_UNCHECKED inline void* generic(uint64_t p) { return (void*)p; }
COC_UNCHECKED inline void* generic(unsigned long long p) { return (void*)p; }
COC_UNCHECKED inline char* dynamic_shared() { return self().block->dynamic_shared; }
COC_UNCHECKED inline void* map_shared(const void* p, unsigned rank) {
  uint32_t offset = shared_address(p);
  if (rank >= cluster_size()) fail("the cluster has no block of rank %u", rank);
  const Block& peer = self().block->leader[rank];
  if (&peer == self().block) return (void*)p;
  if (offset >= kDynamicShared) return peer.dynamic_shared + (offset - kDynamicShared);
  return peer.saved_shared + offset;  // where they are: it is this block that runs
}
COC_UNCHECKED inline Dim cluster_index() {
  const Dim &b = self().block->idx, &c = machine.cluster;
  return {b.x / c.x, b.y / c.y, b.z / c.z};
}

template <class To, class From>
COC_UNCHECKED inline To pun(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit pun between types of different size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <class T>
COC_UNCHECKED inline uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "type in a collective");
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class T>
COC_UNCHECKED inline T unpack(uint64_t bits) {
  T v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

template <class... A, size_t... I>
COC_UNCHECKED inline void call(void (*f)(A...), void** args, std::index_sequence<I...>) {
  f(raw_load<A>(args[I])...);
}
template <class... A>
COC_UNCHECKED inline void call(void (*f)(A...), void** args) {
  call(f, args, std::index_sequence_for<A...>());
}

}  // namespace cuda_on_cpu

// ==== the CUDA language =======================================================================

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
#define __shared__ static __attribute__((section("cuda_shared")))
#define __restrict__
#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define CUDART_INF_F (__builtin_inff())
#define CUDART_NAN_F (__builtin_nanf(""))
#define CUDART_INF (__builtin_inf())
#define CUDART_NAN (__builtin_nan(""))
#define threadIdx (cuda_on_cpu::self().idx)
#define blockIdx (cuda_on_cpu::self().block->idx)
#define blockDim (cuda_on_cpu::machine.block)
#define gridDim (cuda_on_cpu::machine.grid)
#define warpSize 32
#define COC_LINE int line = __builtin_LINE()
#define COC_DEVICE COC_UNCHECKED inline

// Vector types; alignment as in CUDA's vector_types.h.
#define COC_VECTORS(T, N)                                                                  \
  struct N##1 { T x; };                                                                    \
  struct alignas(2 * sizeof(T)) N##2 { T x, y; };                                          \
  struct N##3 { T x, y, z; };                                                              \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; };          \
  inline N##1 make_##N##1(T x) { return {x}; }                                             \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                                     \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }                             \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
COC_VECTORS(signed char, char)
COC_VECTORS(unsigned char, uchar)
COC_VECTORS(short, short)
COC_VECTORS(unsigned short, ushort)
COC_VECTORS(int, int)
COC_VECTORS(unsigned int, uint)
COC_VECTORS(long, long)
COC_VECTORS(unsigned long, ulong)
COC_VECTORS(long long, longlong)
COC_VECTORS(unsigned long long, ulonglong)
COC_VECTORS(float, float)
COC_VECTORS(double, double)
#undef COC_VECTORS
using dim3 = cuda_on_cpu::Dim;

// ---- block, cluster, warp and grid -----------------------------------------------------------

COC_DEVICE void __syncthreads(COC_LINE) {
  cuda_on_cpu::block_barrier("__syncthreads", line, 0, 0, false);
}
COC_DEVICE int __syncthreads_count(int p, COC_LINE) {
  return cuda_on_cpu::block_barrier("__syncthreads_count", line, 0, 0, p != 0);
}
COC_DEVICE int __syncthreads_or(int p, COC_LINE) {
  return cuda_on_cpu::block_barrier("__syncthreads_or", line, 0, 0, p != 0) > 0;
}
COC_DEVICE int __syncthreads_and(int p, COC_LINE) {
  return cuda_on_cpu::block_barrier("__syncthreads_and", line, 0, 0, p == 0) == 0;
}
COC_DEVICE void __cluster_barrier_arrive(COC_LINE) { cuda_on_cpu::cluster_arrive(line); }
COC_DEVICE void __cluster_barrier_wait(COC_LINE) { cuda_on_cpu::cluster_wait(line); }
COC_DEVICE void* __cluster_map_shared_rank(const void* p, unsigned rank) {
  return cuda_on_cpu::map_shared(p, rank);
}
COC_DEVICE void __syncwarp(unsigned mask = 0xFFFFFFFFu, COC_LINE) {
  cuda_on_cpu::exchange("__syncwarp", line, mask, 0);
}
COC_DEVICE unsigned __activemask(COC_LINE) {
  cuda_on_cpu::Thread& t = cuda_on_cpu::self();
  t.op = "__activemask", t.line = line, t.mask = 0, t.state = cuda_on_cpu::State::kActiveMask;
  cuda_on_cpu::suspend();
  return unsigned(t.value);
}

namespace cuda_on_cpu {
// `source` gives the lane to read from, relative to the segment of `width` lanes.
template <class T, class F>
COC_DEVICE T shuffle(const char* op, int line, unsigned mask, T value, int width, F source) {
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail("%s at kernel.cu:%d: width %d is no power of two up to 32", op, line, width);
  Thread& t = exchange(op, line, mask, pack(value));
  int lane = t.lane, start = lane & ~(width - 1);
  int from = source(lane, start);
  if (from < 0) return value;  // outside of the segment: the own value
  return unpack<T>(t.lanes[from]);
}
}  // namespace cuda_on_cpu

template <class T>
COC_DEVICE T __shfl_sync(unsigned mask, T v, int lane, int width = 32, COC_LINE) {
  return cuda_on_cpu::shuffle("__shfl_sync", line, mask, v, width,
                              [=](int, int s) { return s + (lane & (width - 1)); });
}
template <class T>
COC_DEVICE T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32, COC_LINE) {
  return cuda_on_cpu::shuffle("__shfl_up_sync", line, mask, v, width, [=](int l, int s) {
    return l - int(d) < s ? -1 : l - int(d);
  });
}
template <class T>
COC_DEVICE T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32, COC_LINE) {
  return cuda_on_cpu::shuffle("__shfl_down_sync", line, mask, v, width, [=](int l, int s) {
    return l + int(d) >= s + width ? -1 : l + int(d);
  });
}
template <class T>
COC_DEVICE T __shfl_xor_sync(unsigned mask, T v, int m, int width = 32, COC_LINE) {
  // A lane of a later segment is not reached; one of an earlier segment is (as PTX has it).
  return cuda_on_cpu::shuffle("__shfl_xor_sync", line, mask, v, width, [=](int l, int s) {
    return (l ^ m) >= s + width ? -1 : (l ^ m);
  });
}

COC_DEVICE unsigned __ballot_sync(unsigned mask, int p, COC_LINE) {
  auto& t = cuda_on_cpu::exchange("__ballot_sync", line, mask, p != 0);
  unsigned votes = 0;
  for (int i = 0; i < 32; i++)
    if (t.participants >> i & 1) votes |= unsigned(t.lanes[i]) << i;
  return votes;
}
COC_DEVICE int __any_sync(unsigned mask, int p, COC_LINE) {
  auto& t = cuda_on_cpu::exchange("__any_sync", line, mask, p != 0);
  for (int i = 0; i < 32; i++)
    if ((t.participants >> i & 1) && t.lanes[i]) return 1;
  return 0;
}
COC_DEVICE int __all_sync(unsigned mask, int p, COC_LINE) {
  auto& t = cuda_on_cpu::exchange("__all_sync", line, mask, p != 0);
  for (int i = 0; i < 32; i++)
    if ((t.participants >> i & 1) && !t.lanes[i]) return 0;
  return 1;
}
template <class T>
COC_DEVICE unsigned __match_any_sync(unsigned mask, T v, COC_LINE) {
  auto& t = cuda_on_cpu::exchange("__match_any_sync", line, mask, cuda_on_cpu::pack(v));
  unsigned same = 0;
  for (int i = 0; i < 32; i++)
    if ((t.participants >> i & 1) && t.lanes[i] == cuda_on_cpu::pack(v)) same |= 1u << i;
  return same;
}
template <class T>
COC_DEVICE unsigned __match_all_sync(unsigned mask, T v, int* pred, COC_LINE) {
  auto& t = cuda_on_cpu::exchange("__match_all_sync", line, mask, cuda_on_cpu::pack(v));
  *pred = 1;
  for (int i = 0; i < 32; i++)
    if ((t.participants >> i & 1) && t.lanes[i] != cuda_on_cpu::pack(v)) *pred = 0;
  return *pred ? mask : 0;
}
#define COC_REDUCE(NAME, EXPRESSION)                                              \
  template <class T>                                                              \
  COC_DEVICE T NAME(unsigned mask, T v, COC_LINE) {                               \
    auto& t = cuda_on_cpu::exchange(#NAME, line, mask, cuda_on_cpu::pack(v));     \
    T a{};                                                                        \
    bool first = true;                                                            \
    for (int i = 0; i < 32; i++) {                                                \
      if (!(t.participants >> i & 1)) continue;                                   \
      T b = cuda_on_cpu::unpack<T>(t.lanes[i]);                                   \
      a = first ? b : T(EXPRESSION);                                              \
      first = false;                                                              \
    }                                                                             \
    return a;                                                                     \
  }
COC_REDUCE(__reduce_add_sync, a + b)
COC_REDUCE(__reduce_min_sync, a < b ? a : b)
COC_REDUCE(__reduce_max_sync, a > b ? a : b)
COC_REDUCE(__reduce_and_sync, a& b)
COC_REDUCE(__reduce_or_sync, a | b)
COC_REDUCE(__reduce_xor_sync, a ^ b)
#undef COC_REDUCE

COC_DEVICE void __threadfence() { cuda_on_cpu::yield_point(); }
COC_DEVICE void __threadfence_block() { cuda_on_cpu::yield_point(); }
COC_DEVICE void __threadfence_system() { cuda_on_cpu::yield_point(); }
COC_DEVICE void __nanosleep(unsigned) { cuda_on_cpu::yield_point(true); }
[[noreturn]] COC_DEVICE void __trap() { cuda_on_cpu::fail("trap"); }

namespace cooperative_groups {
struct Grid {
  COC_DEVICE void sync(COC_LINE) const { cuda_on_cpu::grid_barrier(line); }
};
struct ThreadBlock {
  COC_DEVICE void sync(COC_LINE) const { __syncthreads(line); }
  COC_DEVICE unsigned thread_rank() const { return cuda_on_cpu::self().rank; }
};
inline Grid this_grid() { return {}; }
inline ThreadBlock this_thread_block() { return {}; }
}  // namespace cooperative_groups

// ---- atomics ---------------------------------------------------------------------------------

namespace cuda_on_cpu {
template <class T>
struct Same {  // keeps the second argument out of template deduction: atomicAdd(long*, 1)
  using type = T;
};
}  // namespace cuda_on_cpu
#define COC_ATOMIC(NAME, EXPRESSION)                                                   \
  template <class T>                                                                   \
  COC_DEVICE T NAME(T* p, typename cuda_on_cpu::Same<T>::type v) {                     \
    static_assert(sizeof(T) >= 2 && sizeof(T) <= 8, #NAME " on this type");            \
    return cuda_on_cpu::atomic(p, [=](T old) COC_UNCHECKED { return T(EXPRESSION); }); \
  }
COC_ATOMIC(atomicAdd, old + v)
COC_ATOMIC(atomicSub, old - v)
COC_ATOMIC(atomicMax, old > v ? old : v)
COC_ATOMIC(atomicMin, old < v ? old : v)
COC_ATOMIC(atomicAnd, old& v)
COC_ATOMIC(atomicOr, old | v)
COC_ATOMIC(atomicXor, old ^ v)
COC_ATOMIC(atomicExch, v)
COC_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
COC_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
#undef COC_ATOMIC
template <class T>
COC_DEVICE T atomicCAS(T* p, typename cuda_on_cpu::Same<T>::type compare,
                       typename cuda_on_cpu::Same<T>::type v) {
  static_assert(std::is_integral<T>::value, "atomicCAS on this type");
  return cuda_on_cpu::atomic(p, [=](T old) COC_UNCHECKED { return old == compare ? v : old; });
}

// ---- loads, bits, math -----------------------------------------------------------------------

template <class T>
inline T __ldg(const T* p) { return *p; }
template <class T>
inline T __ldcs(const T* p) { return *p; }
template <class T>
inline T __ldcg(const T* p) { return *p; }
template <class T>
inline void __stcs(T* p, T v) { *p = v; }
COC_DEVICE unsigned __cvta_generic_to_shared(const void* p) {
  return cuda_on_cpu::shared_address(p);
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long v) {
  return (unsigned long long)__brev(unsigned(v)) << 32 | __brev(unsigned(v >> 32));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    unsigned byte = both >> ((s >> 4 * i & 7) * 8) & 0xFF;
    if (s >> 4 * i & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << 8 * i;
  }
  return r;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  unsigned low = std::max(a & 0xFFFF, b & 0xFFFF), high = std::max(a >> 16, b >> 16);
  return high << 16 | low;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += int8_t(a >> i) * int8_t(b >> i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += uint8_t(a >> i) * uint8_t(b >> i);
  return c;
}
inline unsigned __float_as_uint(float v) { return cuda_on_cpu::pun<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return cuda_on_cpu::pun<float>(v); }
inline int __float_as_int(float v) { return cuda_on_cpu::pun<int>(v); }
inline float __int_as_float(int v) { return cuda_on_cpu::pun<float>(v); }
inline long long __double_as_longlong(double v) { return cuda_on_cpu::pun<long long>(v); }
inline double __longlong_as_double(long long v) { return cuda_on_cpu::pun<double>(v); }

// max and min: the common type as in CUDA (int with unsigned gives unsigned); NaN loses.
template <class A, class B,
          class = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value>>
inline std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<C>::value) return std::fmax(C(a), C(b));
  else return C(a) > C(b) ? C(a) : C(b);
}
template <class A, class B,
          class = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value>>
inline std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<C>::value) return std::fmin(C(a), C(b));
  else return C(a) < C(b) ? C(a) : C(b);
}

inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline double rsqrt(double v) { return 1.0 / sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frsqrt_rn(float v) { return 1.0f / sqrtf(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
#define __expf(v) expf(v)  // macros: glibc declares internal functions of these names
#define __exp10f(v) exp10f(v)
#define __logf(v) logf(v)
#define __log2f(v) log2f(v)
#define __log10f(v) log10f(v)
#define __powf(a, b) powf(a, b)
#define __sinf(v) sinf(v)
#define __cosf(v) cosf(v)
#define __tanf(v) tanf(v)
inline float __saturatef(float v) { return v >= 1.0f ? 1.0f : v > 0.0f ? v : 0.0f; }
inline float2 __fmul2_rn(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 __fadd2_rn(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

// ---- half and bfloat16 -----------------------------------------------------------------------

namespace cuda_on_cpu {
inline uint16_t half_bits(double v) { return pun<uint16_t>(_Float16(v)); }
inline float half_value(uint16_t v) { return float(pun<_Float16>(v)); }
inline uint16_t bfloat16_bits(double wide) {
  // Round to odd on the way to float, so that the second rounding is right for a double too.
  float v = float(wide);
  uint32_t bits = pun<uint32_t>(v);
  if (v != v) return 0x7FFF;
  if (double(v) != wide && !std::isinf(v)) {
    bool away = std::fabs(double(v)) > std::fabs(wide);
    bits = (bits - away) | 1;
  }
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float bfloat16_value(uint16_t v) { return pun<float>(uint32_t(v) << 16); }
}  // namespace cuda_on_cpu

// Arithmetic rounds after every operation, as the device's half instructions do.
#define COC_HALF(H, H2, KIND)                                                                  \
  struct H {                                                                                   \
    uint16_t __x;                                                                              \
    H() = default;                                                                             \
    template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>                 \
    H(T v) : __x(cuda_on_cpu::KIND##_bits(double(v))) {}                                       \
    operator float() const { return cuda_on_cpu::KIND##_value(__x); }                          \
    H& operator+=(H b) { return *this = H(float(*this) + float(b)); }                          \
    H& operator-=(H b) { return *this = H(float(*this) - float(b)); }                          \
    H& operator*=(H b) { return *this = H(float(*this) * float(b)); }                          \
    H& operator/=(H b) { return *this = H(float(*this) / float(b)); }                          \
  };                                                                                           \
  inline H operator+(H a, H b) { return H(float(a) + float(b)); }                              \
  inline H operator-(H a, H b) { return H(float(a) - float(b)); }                              \
  inline H operator*(H a, H b) { return H(float(a) * float(b)); }                              \
  inline H operator/(H a, H b) { return H(float(a) / float(b)); }                              \
  inline H operator-(H a) { a.__x ^= 0x8000; return a; }                                       \
  inline bool operator==(H a, H b) { return float(a) == float(b); }                            \
  inline bool operator!=(H a, H b) { return float(a) != float(b); }                            \
  inline bool operator<(H a, H b) { return float(a) < float(b); }                              \
  inline bool operator>(H a, H b) { return float(a) > float(b); }                              \
  inline bool operator<=(H a, H b) { return float(a) <= float(b); }                            \
  inline bool operator>=(H a, H b) { return float(a) >= float(b); }                            \
  inline H __hadd(H a, H b) { return a + b; }                                                  \
  inline H __hsub(H a, H b) { return a - b; }                                                  \
  inline H __hmul(H a, H b) { return a * b; }                                                  \
  inline H __hdiv(H a, H b) { return a / b; }                                                  \
  inline H __hneg(H a) { return -a; }                                                          \
  inline H __habs(H a) { a.__x &= 0x7FFF; return a; }                                          \
  inline H __hfma(H a, H b, H c) { return H(double(float(a)) * float(b) + float(c)); }         \
  inline H __hmax(H a, H b) { return H(fmaxf(a, b)); }                                         \
  inline H __hmin(H a, H b) { return H(fminf(a, b)); }                                         \
  inline bool __hgt(H a, H b) { return a > b; }                                                \
  inline bool __hlt(H a, H b) { return a < b; }                                                \
  inline bool __hge(H a, H b) { return a >= b; }                                               \
  inline bool __hle(H a, H b) { return a <= b; }                                               \
  inline bool __heq(H a, H b) { return a == b; }                                               \
  inline bool __hne(H a, H b) { return a != b; }                                               \
  inline bool __hisnan(H a) { return float(a) != float(a); }                                   \
  inline H hexp(H a) { return H(expf(a)); }                                                    \
  inline H hexp2(H a) { return H(exp2f(a)); }                                                  \
  inline H hexp10(H a) { return H(exp10f(a)); }                                                \
  inline H hlog(H a) { return H(logf(a)); }                                                    \
  inline H hlog2(H a) { return H(log2f(a)); }                                                  \
  inline H hlog10(H a) { return H(log10f(a)); }                                                \
  inline H hsqrt(H a) { return H(sqrtf(a)); }                                                  \
  inline H hrsqrt(H a) { return H(rsqrtf(a)); }                                                \
  inline H hrcp(H a) { return H(1.0f / float(a)); }                                            \
  inline H hsin(H a) { return H(sinf(a)); }                                                    \
  inline H hcos(H a) { return H(cosf(a)); }                                                    \
  inline H htanh(H a) { return H(tanhf(a)); }                                                  \
  inline H hfloor(H a) { return H(floorf(a)); }                                                \
  inline H hceil(H a) { return H(ceilf(a)); }                                                  \
  inline H htrunc(H a) { return H(truncf(a)); }                                                \
  inline H hrint(H a) { return H(rintf(a)); }                                                  \
  struct alignas(4) H2 {                                                                       \
    H x, y;                                                                                    \
    H2() = default;                                                                            \
    H2(H x, H y) : x(x), y(y) {}                                                               \
  };                                                                                           \
  inline H2 operator+(H2 a, H2 b) { return {a.x + b.x, a.y + b.y}; }                           \
  inline H2 operator-(H2 a, H2 b) { return {a.x - b.x, a.y - b.y}; }                           \
  inline H2 operator*(H2 a, H2 b) { return {a.x * b.x, a.y * b.y}; }                           \
  inline H2 __hadd2(H2 a, H2 b) { return a + b; }                                              \
  inline H2 __hsub2(H2 a, H2 b) { return a - b; }                                              \
  inline H2 __hmul2(H2 a, H2 b) { return a * b; }                                              \
  inline H2 __hfma2(H2 a, H2 b, H2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
  inline H2 __hmax2(H2 a, H2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }               \
  inline H2 __hmin2(H2 a, H2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                \
  inline H __hmax_nan(H a, H b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmax(a, b); }   \
  inline H2 __hmax2_nan(H2 a, H2 b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; }   \
  inline unsigned __hgeu2_mask(H2 a, H2 b) {                                                   \
    return (a.x < b.x ? 0u : 0xFFFFu) | (a.y < b.y ? 0u : 0xFFFF0000u);                        \
  }                                                                                            \
  inline unsigned __hgtu2_mask(H2 a, H2 b) {                                                   \
    return (a.x <= b.x ? 0u : 0xFFFFu) | (a.y <= b.y ? 0u : 0xFFFF0000u);                      \
  }

COC_HALF(__half, __half2, half)
COC_HALF(__nv_bfloat16, __nv_bfloat162, bfloat16)
#undef COC_HALF
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline half __float2half(float v) { return half(v); }
inline half __float2half_rn(float v) { return half(v); }
inline half __double2half(double v) { return half(v); }
inline float __half2float(half v) { return float(v); }
inline half2 __float22half2_rn(float2 v) { return {half(v.x), half(v.y)}; }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline float2 __half22float2(half2 v) { return {float(v.x), float(v.y)}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 make_half2(half x, half y) { return {x, y}; }
inline half2 __half2half2(half v) { return {v, v}; }
inline half __low2half(half2 v) { return v.x; }
inline half __high2half(half2 v) { return v.y; }
inline float __low2float(half2 v) { return float(v.x); }
inline float __high2float(half2 v) { return float(v.y); }
inline unsigned short __half_as_ushort(half v) { return v.__x; }
inline half __ushort_as_half(unsigned short v) { return cuda_on_cpu::pun<half>(v); }
inline nv_bfloat16 __float2bfloat16(float v) { return nv_bfloat16(v); }
inline nv_bfloat16 __float2bfloat16_rn(float v) { return nv_bfloat16(v); }
inline nv_bfloat16 __double2bfloat16(double v) { return nv_bfloat16(v); }
inline float __bfloat162float(nv_bfloat16 v) { return float(v); }
inline nv_bfloat162 __float22bfloat162_rn(float2 v) { return {nv_bfloat16(v.x), nv_bfloat16(v.y)}; }
inline nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {nv_bfloat16(x), nv_bfloat16(y)};
}
inline float2 __bfloat1622float2(nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
inline nv_bfloat162 make_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
inline nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 v) { return {v, v}; }
inline unsigned short __bfloat16_as_ushort(nv_bfloat16 v) { return v.__x; }
inline nv_bfloat16 __ushort_as_bfloat16(unsigned short v) {
  return cuda_on_cpu::pun<nv_bfloat16>(v);
}

// ---- PTX -------------------------------------------------------------------------------------

// What __init__.py translates inline asm to. Values cross as bits when sizes agree, since a .b32
// operand may be bound to a float.
namespace cuda_on_cpu::ptx {
// A GPU's arithmetic keeps neither the payload nor the sign of a NaN.
inline float canonical(float v) { return v != v ? pun<float>(0x7FFFFFFFu) : v; }
inline float max_nan(float a, float b) { return a != a || b != b ? canonical(a + b) : a > b ? a : b; }


template <class To, class From>
COC_DEVICE To as(From v) {
  if constexpr (std::is_same<To, From>::value) return v;
  else if constexpr (sizeof(To) == sizeof(From)) return pun<To>(v);
  else return To(v);
}
template <class D, class V>
COC_DEVICE void set(D& d, V v) { d = as<D>(v); }

// Weak accesses are seen by the race detector; volatile, relaxed, acquire, release ones are not,
// and let other threads run, so that a polling loop ends.
template <class T, class A>
inline T load(A address, int offset, bool strong) {
  if (strong) yield_point(true);
  const char* p = (const char*)generic(address) + offset;
  check_address(p, sizeof(T));
  if (uintptr_t(p) % sizeof(T)) fail("misaligned load from %p", (void*)p);
  return strong ? raw_load<T>(p) : *(const T*)p;
}
template <class T, class A, class V>
inline void store(A address, int offset, bool strong, V v) {
  char* p = (char*)generic(address) + offset;
  check_address(p, sizeof(T));
  if (uintptr_t(p) % sizeof(T)) fail("misaligned store to %p", (void*)p);
  if (strong) {
    yield_point();
    raw_store<T>(p, as<T>(v));
  } else {
    *(T*)p = as<T>(v);
  }
}
template <class A>
COC_DEVICE void check_alignment(A address, int offset, size_t bytes) {
  if (uintptr_t((char*)generic(address) + offset) % bytes) fail("misaligned vector access");
}
template <class A>
COC_DEVICE void check_place(A address, int offset) {
  check_address((char*)generic(address) + offset, 1);
}
// An operand of .shared::cluster instructions.
COC_DEVICE char* in_cluster(uint32_t address, int offset) {
  uint32_t rank = address / kPeer;
  if (!rank) return (char*)generic(address) + offset;
  if (rank > cluster_size()) fail("the cluster has no block of rank %u", rank - 1);
  return (char*)map_shared(generic(address % kPeer), rank - 1) + offset;
}
template <class A>
COC_DEVICE char* in_block(A address, int offset) { return (char*)generic(address) + offset; }
// mapa: an address of the own shared memory to the same of a block of the cluster.
COC_DEVICE uint32_t map_shared_address(uint32_t address, uint32_t rank) {
  if (rank >= cluster_size()) fail("the cluster has no block of rank %u", rank);
  generic(address);
  return address + (rank == self().block->rank ? 0 : kPeer * (rank + 1));
}
template <class T, class A>
inline T* at(A address, int offset) { return (T*)((char*)generic(address) + offset); }

template <class T>
COC_DEVICE void copy_async(T dst, int dst_offset, const void* src, int src_offset, int size,
                           int filled) {
  cuda_on_cpu::copy_async((char*)generic(dst) + dst_offset, (const char*)src + src_offset, size,
                          filled);
}
COC_DEVICE void commit_group() { self().group++; }
COC_DEVICE void wait_group(int pending) { wait_copies(pending); }
COC_DEVICE void wait_all() { self().group++, wait_copies(0); }

template <class A, class B>
COC_DEVICE uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += int(A(a >> i)) * int(B(b >> i));
  return c;
}

// cvt.f16x2.e4m3x2: the low byte becomes the low half. All ones but for the sign are NaN, and there is no infinity.
COC_DEVICE uint32_t halves_of_e4m3(uint16_t bytes) {
  uint32_t found = 0;
  for (int i = 0; i < 2; i++) {
    int byte = bytes >> 8 * i & 0xFF, exponent = byte >> 3 & 15, mantissa = byte & 7;
    double size = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    if ((byte & 0x7F) == 0x7F) size = NAN;
    found |= uint32_t(half_bits(byte & 0x80 ? -size : size)) << 16 * i;
  }
  return found;
}

// shfl.sync: `c` holds the clamp in bits 0-4 and the segment mask in bits 8-12.
COC_DEVICE uint32_t shuffle(const char* mode, uint32_t a, uint32_t b, uint32_t c, uint32_t mask,
                            bool* in_range, int line) {
  Thread& t = exchange("shfl.sync", line, mask, a);
  int lane = t.lane, segment = c >> 8 & 31, clamp = c & 31, by = b & 31;
  int highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment;
  int from = mode[0] == 'u'   ? lane - by
             : mode[0] == 'd' ? lane + by
             : mode[0] == 'b' ? lane ^ by
                              : lowest | (by & ~segment);
  bool inside = mode[0] == 'u' ? from >= highest : from <= highest;
  if (in_range) *in_range = inside;
  return inside ? uint32_t(t.lanes[from]) : a;
}

// Operand A of a product, of all lanes: rows g, then rows g+8.
inline void gather_a(const char* op, const uint32_t* a, uint64_t (&of_a)[2][32], int line) {
  for (int high = 0; high < 2; high++) {
    Thread& t = exchange(op, line, 0xFFFFFFFFu, uint64_t(a[high + 2]) << 32 | a[high]);
    memcpy(of_a[high], t.lanes, sizeof t.lanes);
  }
}

// mma.m16n8k16 with 16-bit operands. Lane 4g+t holds of A rows g and g+8, of B column g, in both the
// k of 2t, 2t+1 and of 2t+8, 2t+9, two to a register; of C and D rows g and g+8, columns 2t, 2t+1.
// The sixteen products are added exactly; hardware rounds in between, in an order it does not tell.
template <class F>
COC_DEVICE void mma(F value, const uint32_t* a, const uint32_t* b, float* c, int line) {
  Thread& t = self();
  uint64_t of_a[2][32], of_b[32];
  gather_a("mma.sync", a, of_a, line);
  exchange("mma.sync", line, 0xFFFFFFFFu, uint64_t(b[1]) << 32 | b[0]);
  memcpy(of_b, t.lanes, sizeof t.lanes);
  int g = t.lane / 4, first = t.lane % 4 * 2;
  for (int i = 0; i < 4; i++) {
    double sum = c[i];
    for (int k = 0; k < 16; k++) {
      int from = k % 8 / 2, shift = k / 8 * 32 + k % 2 * 16;
      sum += double(value(uint16_t(of_a[i / 2][4 * g + from] >> shift))) *
             double(value(uint16_t(of_b[4 * (first + i % 2) + from] >> shift)));
    }
    c[i] = float(sum);
  }
}

// A tf32 operand: a float of which the lowest 13 bits are ignored.
inline float tf32_value(uint32_t bits) {
  float rounded;
  bits &= 0xFFFFE000u;
  memcpy(&rounded, &bits, sizeof rounded);
  return rounded;
}

// mma.m16n8k8 with tf32 operands. Lane 4g+t holds of A rows g and g+8,
// of B column g, in both the k of t and of t+4; of C and D as above.
inline void mma_tf32(const uint32_t* a, const uint32_t* b, float* c, int line) {
  Thread& t = self();
  uint64_t of_a[2][32], of_b[32];
  gather_a("mma.sync", a, of_a, line);
  exchange("mma.sync", line, 0xFFFFFFFFu, uint64_t(b[1]) << 32 | b[0]);
  memcpy(of_b, t.lanes, sizeof t.lanes);
  auto value = [](uint64_t both, int k) { return double(tf32_value(uint32_t(both >> k / 4 * 32))); };
  int g = t.lane / 4, first = t.lane % 4 * 2;
  for (int i = 0; i < 4; i++) {
    double sum = c[i];
    for (int k = 0; k < 8; k++)
      sum += value(of_a[i / 2][4 * g + k % 4], k) * value(of_b[4 * (first + i % 2) + k % 4], k);
    c[i] = float(sum);
  }
}

// wgmma with A in registers: of the 64 rows each of four warps has 16, as of mma.m16n8k16, and likewise of D, whose N
// columns lie one eight behind the other. B is in dynamic shared memory, where `matrix` describes it: matrices of eight
// columns by 16 bytes of k, a column behind the other. Each warp goes through it when it comes to it.
template <int N, class F>
COC_DEVICE void wgmma(F value, const uint32_t* a, uint64_t matrix, bool added, float* d, int line) {
  Thread& t = self();
  uint64_t of_a[2][32];
  gather_a("wgmma", a, of_a, line);
  if (matrix >> 49) fail("wgmma at kernel.cu:%d: layout %d of a matrix is not emulated", line, int(matrix >> 62));
  uint32_t start = (matrix & 0x3FFF) * 16, along_k = (matrix >> 16 & 0x3FFF) * 16, along_n = (matrix >> 32 & 0x3FFF) * 16;
  int g = t.lane / 4, first = t.lane % 4 * 2;
  for (int j = 0; j < N / 8; j++)
    for (int c = 0; c < 2; c++) {
      double sum[2] = {added ? d[j * 4 + c] : 0, added ? d[j * 4 + 2 + c] : 0};
      for (int k = 0; k < 16; k++) {
        uint32_t offset = start + k / 8 * along_k + j * along_n + (first + c) * 16 + k % 8 * 2;
        const uint16_t* b = (const uint16_t*)generic(kDynamicShared + offset);
        check_address(b, sizeof *b);
        for (int high = 0; high < 2; high++) {
          uint64_t both = of_a[high][4 * g + k % 8 / 2];
          sum[high] += double(value(uint16_t(both >> (k / 8 * 32 + k % 2 * 16)))) * double(value(*b));
        }
      }
      d[j * 4 + c] = float(sum[0]), d[j * 4 + 2 + c] = float(sum[1]);
    }
}

// wgmma with both operands in dynamic shared memory, rows of which are swizzled by their bytes: of A a warp has 16 of 64.
// Of a transposed operand the rows are those of k, and boxes of as many columns as are swizzled lie apart. `value` tells
// the size of an element, of which a row has 32 bytes.
template <int N, class E, class R>
COC_DEVICE void wgmma(R value(E), uint64_t of_a, uint64_t of_b, bool added, float* d, bool across_a, bool across_b) {
  Thread& t = self();
  const int size = sizeof(E);
  exchange("wgmma", 0, 0xFFFFFFFFu, of_a ^ of_b);
  auto element = [&](uint64_t matrix, bool across, int row, int k) {
    uint32_t layout = matrix >> 62, group = (matrix >> 32 & 0x3FFF) * 16, wide = group / 8;
    if (!layout || group != 256u << (3 - layout)) fail("wgmma: layout %u with groups of %u bytes", layout, group);
    uint32_t linear = (matrix & 0x3FFF) * 16;
    if (across)
      linear += row * size / wide * (matrix >> 16 & 0x3FFF) * 16 + k / 8 * group + k % 8 * wide + row * size % wide;
    else linear += row / 8 * group + row % 8 * wide + k * size;
    const E* p = (const E*)generic(kDynamicShared + swizzled(linear, 4 - layout));
    check_address(p, sizeof *p);
    return double(value(*p));
  };
  for (int j = 0; j < N / 2; j++) {
    int row = t.warp % 4 * 16 + j / 2 % 2 * 8 + t.lane / 4, column = j / 4 * 8 + t.lane % 4 * 2 + j % 2;
    double sum = added ? d[j] : 0;
    for (int k = 0; k < 32 / size; k++) sum += element(of_a, across_a, row, k) * element(of_b, across_b, column, k);
    d[j] = float(sum);
  }
}

// The box of a matrix to the same place in the shared memory of each thread block whose rank is a bit of `ranks`.
COC_DEVICE void copy_box(const void* map, int32_t column, int32_t row, uint32_t dst, uint32_t mbarrier, uint32_t ranks) {
  for (uint32_t rank = 0; rank < 16; rank++)
    if (ranks >> rank & 1)
      box_copy(*(const Matrix*)map, column, row, (char*)map_shared(generic(dst), rank),
               (char*)map_shared(generic(mbarrier), rank));
}

// ldmatrix: lane 8j+r has the address of row r of matrix j, eight 16-bit elements; lane 4g+t gets of
// each matrix elements 2t and 2t+1 of row g, or transposed of column g.
template <class A>
inline void load_matrices(A address, int offset, int count, bool transposed, uint32_t* r, int line) {
  char* row = (char*)generic(address) + offset;
  if (uintptr_t(row) % 16 && int(self().lane) < 8 * count) fail("misaligned row of ldmatrix");
  Thread& t = exchange("ldmatrix", line, 0xFFFFFFFFu, uint64_t(row));
  uint64_t rows[32];
  memcpy(rows, t.lanes, sizeof rows);
  int g = t.lane / 4, pair = t.lane % 4 * 2;
  for (int j = 0; j < count; j++) {
    uint32_t both = 0;
    for (int i = 0; i < 2; i++) {
      const uint16_t* p = (const uint16_t*)rows[8 * j + (transposed ? pair + i : g)] + (transposed ? g : pair + i);
      check_address(p, sizeof *p);
      both |= uint32_t(*p) << 16 * i;
    }
    r[j] = both;
  }
}

}  // namespace cuda_on_cpu::ptx

#endif  // COC_MACHINE

// Fibers, the scheduler, barriers and the meeting point of warp operations behind simt.h.
//
// Blocks run one after another, the threads of a block as fibers in index order or shuffled by a seed. A launch that
// cannot go on (deadlock, divergent barrier, bad mask) ends with a message. Compiled without -fsanitize=thread: the
// scheduler is no part of the race check, and tells ThreadSanitizer what barriers order.
#include "simt.h"

#include <cstdarg>
#include <cstdio>
#include <deque>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN 1
#endif
#if defined(SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

#if defined(__x86_64__)
extern "C" void simt_switch(void** from, void* to);  // saves the callee's registers, swaps stacks
asm(R"(
.text
.local simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch,.-simt_switch
)");
#else
#include <ucontext.h>
#endif

namespace simt {
namespace {
enum State { Ready, AtBarrier, InWarpOperation, Done };

struct Fiber : Thread {
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    char* stack = nullptr;
    State state = Done;
    int line = 0, predicate = 0;
    const char* what = "";
    unsigned mask = 0;
    void* slot = nullptr;
    WarpOperation operation = nullptr;
    std::deque<Copy> copies;
#if defined(SIMT_TSAN)
    void* tsan = nullptr;
    char warp_sync[2];
    unsigned warp_operations = 0, seen[32];
#endif
};

constexpr size_t kStack = 256 * 1024, kGuard = 4096, kMaxShared = 227 * 1024;
constexpr int kMaxThreads = 1024;
std::vector<Fiber*> fibers;  // grows; later launches use them again
int ready[kMaxThreads];      // ring of runnable threads; each is in it at most once
unsigned ready_head = 0, ready_tail = 0;
int num_threads = 0, num_done = 0, num_arrived = 0;
Fiber* self = nullptr;
bool failed = false, shuffled = false;
std::string error;
std::mt19937 rng;
void (*entry)(void**) = nullptr;
void** entry_arguments = nullptr;
size_t dynamic_shared_bytes = 0;
struct Range { char* begin; size_t size; };
std::vector<Range> static_shared;  // `__shared__` variables, found in the symbol table

#if defined(__x86_64__)
void* main_stack_pointer;
#else
ucontext_t main_context;
#endif
#if defined(ASAN)
void* main_fake_stack;
const void* main_bottom;
size_t main_size;
#endif
#if defined(SIMT_TSAN)
void* main_tsan;
char launch_sync, barrier_sync[2];
unsigned barrier_phase;
#endif

void to_main(bool dying = false) {
    Fiber* f = self;
#if defined(ASAN)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(dying ? nullptr : &fake_stack, main_bottom, main_size);
#endif
#if defined(SIMT_TSAN)
    __tsan_switch_to_fiber(main_tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
    simt_switch(&f->stack_pointer, main_stack_pointer);
#else
    swapcontext(&f->context, &main_context);
#endif
#if defined(ASAN)
    __sanitizer_finish_switch_fiber(fake_stack, &main_bottom, &main_size);
#endif
    (void)dying;
}

void fiber_main() {
#if defined(ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
#if defined(SIMT_TSAN)
    __tsan_acquire(&launch_sync);
#endif
    entry(entry_arguments);
#if defined(SIMT_TSAN)
    __tsan_release(&launch_sync);
#endif
    self->state = Done;
    ++num_done;
    for (const Copy& c : self->copies)
        if (!c.commit) fail("thread exits with cp.async copies it never waited for");
    to_main(true);
    abort();
}

void start(Fiber* f) {
    if (!f->stack) {
        void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) { perror("mmap"); abort(); }
        f->stack = static_cast<char*>(memory);
        mprotect(f->stack, kGuard, PROT_NONE);  // an overflow faults instead of corrupting
#if defined(SIMT_TSAN)
        f->tsan = __tsan_create_fiber(0);
#endif
    }
#if defined(ASAN)
    __asan_unpoison_memory_region(f->stack + kGuard, kStack - kGuard);
#endif
    f->copies.clear();
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(f->stack + kStack - 64);
    *--top = nullptr;  // keeps %rsp % 16 == 8 at entry
    *--top = reinterpret_cast<void*>(fiber_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    f->stack_pointer = top;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack + kGuard;
    f->context.uc_stack.ss_size = kStack - kGuard;
    f->context.uc_link = nullptr;
    makecontext(&f->context, fiber_main, 0);
#endif
    f->state = Ready;
}

void resume(Fiber* f) {
    self = f;
    current = f;
#if defined(ASAN)
    __sanitizer_start_switch_fiber(&main_fake_stack, f->stack + kGuard, kStack - kGuard);
#endif
#if defined(SIMT_TSAN)
    __tsan_switch_to_fiber(f->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
    simt_switch(&main_stack_pointer, f->stack_pointer);
#else
    swapcontext(&main_context, &f->context);
#endif
#if defined(ASAN)
    __sanitizer_finish_switch_fiber(main_fake_stack, nullptr, nullptr);
#endif
    current = nullptr;
}

void make_ready(Fiber* f) {
    f->state = Ready;
    const int thread = f->index.x + block_dim.x * (f->index.y + block_dim.y * f->index.z);
    ready[ready_tail++ % kMaxThreads] = thread;
}

void report_deadlock() {
    error = "deadlock:";
    std::vector<bool> said(num_threads);
    for (int i = 0; i < num_threads; ++i) {
        if (said[i]) continue;
        const Fiber* f = fibers[i];
        int count = 0;
        for (int j = i; j < num_threads; ++j) {
            const Fiber* g = fibers[j];
            if (g->state != f->state || (f->state != Done && (g->line != f->line || g->mask != f->mask))) continue;
            said[j] = true;
            ++count;
        }
        char text[256];
        if (f->state == InWarpOperation)
            snprintf(text, sizeof text, " %d thread(s) in %s at line %d, mask %08x (first: thread %d);", count, f->what, f->line, f->mask, i);
        else if (f->state == AtBarrier)
            snprintf(text, sizeof text, " %d thread(s) at a barrier at line %d (first: thread %d);", count, f->line, i);
        else
            snprintf(text, sizeof text, " %d thread(s) exited (first: thread %d);", count, i);
        error += text;
    }
    failed = true;
}

void run_block() {
#if defined(SIMT_TSAN)
    __tsan_acquire(&launch_sync);
#endif
    for (const Range& r : static_shared) memset(r.begin, 0xff, r.size);  // unset shared memory reads as NaN, as -1
    if (dynamic_shared_bytes) memset(dynamic_shared, 0xff, dynamic_shared_bytes);
#if defined(SIMT_TSAN)
    __tsan_release(&launch_sync);
#endif
    num_done = num_arrived = 0;
    ready_head = ready_tail = 0;
    for (int i = 0; i < num_threads; ++i) {
        start(fibers[i]);
        make_ready(fibers[i]);
    }
    while (!failed && ready_head != ready_tail) {
        if (shuffled) {
            const unsigned other = ready_head + rng() % (ready_tail - ready_head);
            std::swap(ready[ready_head % kMaxThreads], ready[other % kMaxThreads]);
        }
        resume(fibers[ready[ready_head++ % kMaxThreads]]);
    }
    if (!failed && num_done < num_threads) report_deadlock();
}
}  // namespace

Thread* current = nullptr;
uint3 block_index;
dim3 block_dim, grid_dim;
char* dynamic_shared = nullptr;

void fail(const char* format, ...) {
    char text[512], where[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const uint3 b = block_index, t = self->index;
    snprintf(where, sizeof where, " [block (%u,%u,%u) thread (%u,%u,%u)]", b.x, b.y, b.z, t.x, t.y, t.z);
    error = std::string(text) + where;
    failed = true;
    to_main(true);
    abort();
}

void yield() {
    make_ready(self);
    to_main();
}

int barrier(int line, int predicate, Reduce how) {
    Fiber* f = self;
    if (num_done) fail("barrier at line %d, but %d thread(s) of the block have exited", line, num_done);
    f->line = line;
    f->predicate = predicate != 0;
    f->mask = 0;
    f->state = AtBarrier;
#if defined(SIMT_TSAN)
    const unsigned phase = barrier_phase & 1;
    __tsan_release(&barrier_sync[phase]);
#endif
    if (++num_arrived == num_threads) {
        int count = 0;
        for (int i = 0; i < num_threads; ++i) {
            if (fibers[i]->line != line)
                fail("threads of one block wait at different barriers: lines %d and %d", line, fibers[i]->line);
            count += fibers[i]->predicate;
        }
        const int result = how == Reduce::Or ? count != 0 : how == Reduce::And ? count == num_threads : count;
        num_arrived = 0;
#if defined(SIMT_TSAN)
        ++barrier_phase;
#endif
        for (int i = 0; i < num_threads; ++i) {
            fibers[i]->predicate = result;
            make_ready(fibers[i]);
        }
    }
    to_main();
#if defined(SIMT_TSAN)
    __tsan_acquire(&barrier_sync[phase]);
#endif
    return f->predicate;
}

// `fence`: whether the operation orders memory among its lanes; on the GPU only __syncwarp does.
void collective(const char* what, unsigned mask, int line, void* slot, WarpOperation operation, bool fence) {
    Fiber* f = self;
    const int base = f->warp * 32, lanes = std::min(32, num_threads - base);
    if (!(mask >> f->lane & 1)) fail("%s at line %d: mask %08x leaves out the calling lane %u", what, line, mask, f->lane);
    if (lanes < 32 && mask >> lanes) {
        if (mask != 0xffffffffu) fail("%s at line %d: mask %08x names lanes past the block's end", what, line, mask);
        mask &= (1u << lanes) - 1;
    }
    f->what = what;
    f->line = line;
    f->mask = mask;
    f->slot = slot;
    f->operation = operation;
    f->state = InWarpOperation;
#if defined(SIMT_TSAN)
    if (fence) __tsan_release(&f->warp_sync[++f->warp_operations & 1]);
#endif
    bool complete = true;
    for (int lane = 0; lane < lanes && complete; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const Fiber* g = fibers[base + lane];
        if (g->state == Done) fail("%s at line %d: lane %d of mask %08x has exited", what, line, lane, mask);
        complete = g->state == InWarpOperation;
        if (complete && (g->mask != mask || g->operation != operation))
            fail("lanes of one warp meet in different operations: %s (line %d, mask %08x) and %s (line %d, mask %08x)",
                 what, line, mask, g->what, g->line, g->mask);
    }
    if (complete) {
        void* slots[32] = {};
        for (int lane = 0; lane < lanes; ++lane)
            if (mask >> lane & 1) slots[lane] = fibers[base + lane]->slot;
        operation(mask, slots);
        for (int lane = 0; lane < lanes; ++lane) {
            if (!(mask >> lane & 1)) continue;
#if defined(SIMT_TSAN)
            for (int other = 0; fence && other < lanes; ++other)
                if (mask >> other & 1) fibers[base + lane]->seen[other] = fibers[base + other]->warp_operations;
#endif
            make_ready(fibers[base + lane]);
        }
    }
    to_main();
#if defined(SIMT_TSAN)
    for (int other = 0; fence && other < lanes; ++other)
        if (mask >> other & 1) __tsan_acquire(&fibers[base + other]->warp_sync[f->seen[other] & 1]);
#endif
    (void)fence;
}

void copy_push(const Copy& c) { self->copies.push_back(c); }

bool copy_pop(int keep_groups, Copy& out) {
    auto& copies = self->copies;
    int groups = 0;
    for (const Copy& c : copies) groups += c.commit;
    while (!copies.empty() && groups > keep_groups) {
        const Copy c = copies.front();
        copies.pop_front();
        if (!c.commit) {
            out = c;
            return true;
        }
        --groups;
    }
    return false;
}
}  // namespace simt

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))
SIMT_EXPORT char simt_anchor;
char simt_anchor = 0;  // symbol addresses are given relative to it

SIMT_EXPORT void simt_add_shared(void* begin, size_t size) {
    simt::static_shared.push_back({static_cast<char*>(begin), size});
}

// Run a kernel on a grid; `seed` 0 keeps threads and blocks in index order. Returns an error message or null.
SIMT_EXPORT const char* simt_launch(void (*function)(void**), void** arguments, const unsigned* grid,
                                    const unsigned* block, size_t shared, unsigned seed) {
    using namespace simt;
    if (block[0] * block[1] * block[2] < 1 || block[0] * block[1] * block[2] > kMaxThreads)
        return "a block has 1 to 1024 threads";
    if (grid[0] < 1 || grid[1] < 1 || grid[2] < 1) return "a grid has at least one block";
    if (shared > kMaxShared) return "more than 227 KB of dynamic shared memory";
    entry = function;
    entry_arguments = arguments;
    grid_dim = dim3(grid[0], grid[1], grid[2]);
    block_dim = dim3(block[0], block[1], block[2]);
    num_threads = block[0] * block[1] * block[2];
    failed = false;
    shuffled = seed != 0;
    rng.seed(seed);
    while (static_cast<int>(fibers.size()) < num_threads) fibers.push_back(new Fiber);
    for (int i = 0; i < num_threads; ++i) {
        fibers[i]->index = make_uint3(i % block[0], i / block[0] % block[1], i / (block[0] * block[1]));
        fibers[i]->lane = i % 32;
        fibers[i]->warp = i / 32;
    }
    const size_t allocated = (shared + 1023) / 1024 * 1024;
    dynamic_shared_bytes = shared;
    dynamic_shared = shared ? static_cast<char*>(aligned_alloc(1024, allocated)) : nullptr;
#if defined(ASAN)
    if (shared) __asan_poison_memory_region(dynamic_shared + shared, allocated - shared);
#endif
#if defined(SIMT_TSAN)
    main_tsan = __tsan_get_current_fiber();
    __tsan_release(&launch_sync);
#endif
    std::vector<unsigned> order(grid[0] * grid[1] * grid[2]);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    for (unsigned i = order.size(); shuffled && i > 1; --i) std::swap(order[i - 1], order[rng() % i]);
    for (unsigned b : order) {
        block_index = make_uint3(b % grid[0], b / grid[0] % grid[1], b / (grid[0] * grid[1]));
        run_block();
        if (failed) break;
    }
#if defined(SIMT_TSAN)
    __tsan_acquire(&launch_sync);
#endif
#if defined(ASAN)
    if (shared) __asan_unpoison_memory_region(dynamic_shared, allocated);
#endif
    free(dynamic_shared);
    dynamic_shared = nullptr;
    return failed ? error.c_str() : nullptr;
}

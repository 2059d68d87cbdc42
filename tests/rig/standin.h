/* What the files of the stand-in share: its lock, its entry checks, its allocations, its queues of work.
 *
 * One lock guards everything. It is never held while an operation of a stream runs: a kernel of the tensorrt
 * double is Python, and whoever waits for the interpreter lock must not hold this one.
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 4

typedef struct Context {
    CUdevice device;
    int retained;  /* references to the primary context of `device`; 0 = it does not exist */
} Context;

typedef enum Kind { DEVICE_MEMORY, HOST_MEMORY, REGISTERED_MEMORY } Kind;

typedef struct Allocation {
    uintptr_t base;
    size_t size;
    Kind kind;
    Context *owner;
} Allocation;

/* Rows of rows, as cuMemcpy3D copies them; a linear copy is one row, a memset has no source. */
typedef struct Side {
    uintptr_t start;
    size_t pitch, height;  /* bytes from row to row, rows from slice to slice */
    bool host;
} Side;

typedef enum Verb { COPY, FILL, KERNEL, HOST_FUNCTION, RECORD, WAIT } Verb;

typedef struct Kernel {
    uint64_t id;
    int references;
} Kernel;

typedef struct Op {
    Verb verb;
    Side from, to;
    size_t width, rows, slices;
    uint32_t value;  /* FILL: the element, of `element` bytes */
    size_t element;
    void *snapshot;  /* COPY: pageable bytes as they were when the copy was asked for */
    Kernel *kernel;
    CUhostFn function;
    void *data;
    CUevent event;
    CUstream stream;  /* WAIT: for this stream … */
    uint64_t until;   /* … to have done this many operations */
    struct Op *next;
} Op;

struct CUgraph_st {
    Op *first, *last;
    bool live;
};

struct CUgraphExec_st {
    Op *first;
    bool live;
};

struct CUstream_st {
    Context *owner;
    unsigned int flags;
    bool live, running;
    uint64_t issued, done;
    Op *first, *last;
    CUgraph capture;
    CUstreamCaptureMode mode;
    pthread_t capturer;
    bool capture_broken;
    struct CUstream_st *next;
};

struct CUevent_st {
    bool live, timed;
    CUstream stream;
    uint64_t ticket;
    CUgraph captured_in;
    double at_ms;
};

extern pthread_mutex_t standin_lock;

/* Entry of a driver call: takes the lock, counts the call, and returns the failure asked for by a test, if any. */
CUresult standin_enter(const char *name, bool wants_context);
CUresult standin_leave(CUresult result);
#define ENTER(name)                                                   \
    do {                                                              \
        CUresult entered = standin_enter(name, true);                 \
        if (entered != CUDA_SUCCESS) return standin_leave(entered);   \
    } while (0)
#define ENTER_WITHOUT_CONTEXT(name)                                   \
    do {                                                              \
        CUresult entered = standin_enter(name, false);                \
        if (entered != CUDA_SUCCESS) return standin_leave(entered);   \
    } while (0)
#define LEAVE(result) return standin_leave(result)

/* With the lock held. */
Context *standin_current(void);
void standin_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
Allocation *standin_find(uintptr_t address);
bool standin_in_bounds(const Side *side, size_t width, size_t rows, size_t slices);
void standin_free_owned_by(Context *owner);
CUstream standin_stream(CUstream stream);
CUresult standin_issue(CUstream stream, Op op);
void standin_drain(CUstream stream, uint64_t until, bool wait_for_others);
CUresult standin_drain_blocking(Context *owner);
void standin_drain_idle(void);
CUresult standin_forbidden_in_capture(const char *name);
CUresult standin_async_error(void);
void standin_drop_streams(Context *owner);
void standin_run_copy(Op *op);

#endif

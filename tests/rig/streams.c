/* Streams, events and graphs of the stand-in: queues of work that runs when somebody waits for it. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_RELEASED 65536

typedef int (*RunKernel)(uint64_t id);

static CUstream streams;
static RunKernel run_kernel;
static CUresult async_error;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static uint64_t released[MAX_RELEASED];
static size_t released_count;
static long live_streams, live_events, live_graphs, live_execs, launches;

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

CUresult standin_async_error(void) { return async_error; }

CUstream standin_stream(CUstream stream) {
    for (CUstream each = streams; each != NULL; each = each->next) {
        if (each == stream) return each->live ? each : NULL;
    }
    return NULL;
}

static void let_go(Kernel *kernel) {
    if (kernel == NULL || --kernel->references > 0) return;
    if (released_count < MAX_RELEASED) released[released_count++] = kernel->id;
    free(kernel);
}

static void free_op(Op *op) {
    let_go(op->kernel);
    free(op->snapshot);
    free(op);
}

static void free_ops(Op *op) {
    while (op != NULL) {
        Op *next = op->next;
        free_op(op);
        op = next;
    }
}

static Op *copy_of(const Op *op) {
    Op *made = malloc(sizeof *made);
    *made = *op;
    made->next = NULL;
    if (made->kernel != NULL) made->kernel->references++;
    return made;
}

static void append(Op **first, Op **last, Op *op) {
    if (*last != NULL) (*last)->next = op;
    else *first = op;
    *last = op;
}

/* Into the stream's graph while it captures, else into its queue. */
CUresult standin_issue(CUstream stream, Op op) {
    if (op.kernel != NULL) op.kernel->references--;  /* copy_of takes its own */
    if (stream->capture != NULL) {
        if (stream->capture_broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        append(&stream->capture->first, &stream->capture->last, copy_of(&op));
        return CUDA_SUCCESS;
    }
    append(&stream->first, &stream->last, copy_of(&op));
    stream->issued++;
    return CUDA_SUCCESS;
}

static void run(CUstream stream, Op *op) {
    bool fits = true;
    if (op->verb == COPY && op->snapshot == NULL) fits = standin_in_bounds(&op->from, op->width, op->rows, op->slices);
    if (op->verb == COPY || op->verb == FILL) fits = fits && standin_in_bounds(&op->to, op->width, op->rows, op->slices);
    if (!fits) {
        standin_complain("a copy ran after its memory was freed");
        async_error = CUDA_ERROR_ILLEGAL_ADDRESS;
        return;
    }
    if (op->verb == RECORD) op->event->at_ms = now_ms();
    if (op->verb == WAIT && op->stream != stream) standin_drain(op->stream, op->until, true);
    pthread_mutex_unlock(&standin_lock);
    int failed = 0;
    if (op->verb == COPY || op->verb == FILL) standin_run_copy(op);
    if (op->verb == HOST_FUNCTION) op->function(op->data);
    if (op->verb == KERNEL) failed = run_kernel(op->kernel->id);
    pthread_mutex_lock(&standin_lock);
    if (failed) async_error = CUDA_ERROR_LAUNCH_FAILED;
}

/* Run what was issued up to `until`. One thread at a time runs a stream; without `wait_for_others` we let it. */
void standin_drain(CUstream stream, uint64_t until, bool wait_for_others) {
    while (stream->done < until) {
        if (stream->running) {
            if (!wait_for_others) return;
            pthread_cond_wait(&moved, &standin_lock);
            continue;
        }
        Op *op = stream->first;
        stream->first = op->next;
        if (stream->first == NULL) stream->last = NULL;
        stream->running = true;
        run(stream, op);
        stream->running = false;
        stream->done++;
        free_op(op);
        pthread_cond_broadcast(&moved);
    }
}

CUresult standin_drain_blocking(Context *owner) {
    for (CUstream each = streams; each != NULL; each = each->next) {
        if (!each->live || each->owner != owner || (each->flags & CU_STREAM_NON_BLOCKING)) continue;
        if (each->capture != NULL) {
            each->capture_broken = true;
            standin_complain("a call on the default stream while a stream that waits for it captures");
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        standin_drain(each, each->issued, true);
    }
    return standin_forbidden_in_capture("a call on the default stream");
}

/* What frees memory waits for the device, except for streams that another thread is just running. */
void standin_drain_idle(void) {
    for (CUstream each = streams; each != NULL; each = each->next) standin_drain(each, each->issued, false);
}

/* Calls that may wait for the device break captures of their thread (of every thread in global mode). */
CUresult standin_forbidden_in_capture(const char *name) {
    for (CUstream each = streams; each != NULL; each = each->next) {
        if (each->capture == NULL || each->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
        bool ours = pthread_equal(each->capturer, pthread_self());
        if (each->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && !ours) continue;
        each->capture_broken = true;
        standin_complain("%s while a stream captures", name);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CUDA_SUCCESS;
}

static void end(CUstream stream) {
    standin_drain(stream, stream->issued, false);
    stream->live = false;
    live_streams--;
}

void standin_drop_streams(Context *owner) {
    for (CUstream each = streams; each != NULL; each = each->next) {
        if (each->live && each->owner == owner) {
            standin_complain("context released: a stream was never destroyed");
            end(each);
        }
    }
}

EXPORT CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER("cuStreamCreate");
    CUstream made = calloc(1, sizeof *made);
    made->owner = standin_current();
    made->flags = flags;
    made->live = true;
    made->next = streams;
    streams = made;
    live_streams++;
    *stream = made;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    (void)priority;
    return cuStreamCreate(stream, flags);
}

#define FIND(given)                                      \
    CUstream stream = standin_stream(given);             \
    if (stream == NULL) {                                \
        standin_complain("%s: no such stream", __func__); \
        LEAVE(CUDA_ERROR_INVALID_HANDLE);                \
    }

EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream given) {
    ENTER("cuStreamDestroy");
    FIND(given);
    end(stream);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream given) {
    ENTER("cuStreamSynchronize");
    if (given == NULL || given == CU_STREAM_LEGACY) {
        CUresult drained = standin_drain_blocking(standin_current());
        LEAVE(drained != CUDA_SUCCESS ? drained : async_error);
    }
    FIND(given);
    if (stream->capture != NULL) {
        stream->capture_broken = true;
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    standin_drain(stream, stream->issued, true);
    LEAVE(async_error);
}

/* Asking often enough makes work finish: each question runs one operation. */
EXPORT CUresult CUDAAPI cuStreamQuery(CUstream given) {
    ENTER("cuStreamQuery");
    FIND(given);
    if (stream->done == stream->issued) LEAVE(async_error);
    standin_drain(stream, stream->done + 1, false);
    LEAVE(CUDA_ERROR_NOT_READY);
}

EXPORT CUresult CUDAAPI cuCtxSynchronize(void) {
    ENTER("cuCtxSynchronize");
    CUresult forbidden = standin_forbidden_in_capture("cuCtxSynchronize");
    if (forbidden != CUDA_SUCCESS) LEAVE(forbidden);
    for (CUstream each = streams; each != NULL; each = each->next) standin_drain(each, each->issued, true);
    LEAVE(async_error);
}

EXPORT CUresult CUDAAPI cuStreamGetCtx(CUstream given, CUcontext *context) {
    ENTER("cuStreamGetCtx");
    FIND(given);
    *context = (CUcontext)stream->owner;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamGetFlags(CUstream given, unsigned int *flags) {
    ENTER("cuStreamGetFlags");
    FIND(given);
    *flags = stream->flags;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuLaunchHostFunc(CUstream given, CUhostFn function, void *data) {
    ENTER("cuLaunchHostFunc");
    FIND(given);
    LEAVE(standin_issue(stream, (Op){.verb = HOST_FUNCTION, .function = function, .data = data}));
}

/* Events */

EXPORT CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER("cuEventCreate");
    CUevent made = calloc(1, sizeof *made);
    made->live = true;
    made->timed = !(flags & CU_EVENT_DISABLE_TIMING);
    live_events++;
    *event = made;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventDestroy(CUevent event) {
    ENTER("cuEventDestroy");
    if (!event->live) {
        standin_complain("cuEventDestroy: destroyed before");
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    }
    event->live = false;  /* kept: operations in queues may still name it */
    live_events--;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventRecord(CUevent event, CUstream given) {
    ENTER("cuEventRecord");
    if (!event->live) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (given == NULL) {
        CUresult drained = standin_drain_blocking(standin_current());
        event->at_ms = now_ms();
        event->stream = NULL;
        LEAVE(drained);
    }
    FIND(given);
    event->captured_in = stream->capture;
    CUresult issued = standin_issue(stream, (Op){.verb = RECORD, .event = event});
    if (stream->capture == NULL) {
        event->stream = stream;
        event->ticket = stream->issued;
    }
    LEAVE(issued);
}

static bool happened(CUevent event) { return event->stream == NULL || event->stream->done >= event->ticket; }

EXPORT CUresult CUDAAPI cuEventQuery(CUevent event) {
    ENTER("cuEventQuery");
    if (!event->live) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    CUresult forbidden = standin_forbidden_in_capture("cuEventQuery");
    if (forbidden != CUDA_SUCCESS) LEAVE(forbidden);
    if (happened(event)) LEAVE(async_error);
    standin_drain(event->stream, event->stream->done + 1, false);
    LEAVE(CUDA_ERROR_NOT_READY);
}

EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent event) {
    ENTER("cuEventSynchronize");
    if (!event->live) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (event->captured_in != NULL) LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (!happened(event)) standin_drain(event->stream, event->ticket, true);
    LEAVE(async_error);
}

EXPORT CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent first, CUevent second) {
    ENTER("cuEventElapsedTime");
    if (!first->timed || !second->timed) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (!happened(first) || !happened(second)) LEAVE(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)(second->at_ms - first->at_ms);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamWaitEvent(CUstream given, CUevent event, unsigned int flags) {
    (void)flags;
    ENTER("cuStreamWaitEvent");
    FIND(given);
    if (!event->live) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (stream->capture != event->captured_in) {
        if (stream->capture != NULL) stream->capture_broken = true;
        standin_complain("cuStreamWaitEvent between a capture and what is not in it");
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    if (happened(event)) LEAVE(CUDA_SUCCESS);
    LEAVE(standin_issue(stream, (Op){.verb = WAIT, .stream = event->stream, .until = event->ticket}));
}

/* Graphs */

EXPORT CUresult CUDAAPI cuStreamBeginCapture(CUstream given, CUstreamCaptureMode mode) {
    ENTER("cuStreamBeginCapture");
    FIND(given);
    if (stream->capture != NULL) LEAVE(CUDA_ERROR_ILLEGAL_STATE);
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->capture->live = true;
    stream->mode = mode;
    stream->capturer = pthread_self();
    stream->capture_broken = false;
    live_graphs++;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamIsCapturing(CUstream given, CUstreamCaptureStatus *status) {
    ENTER("cuStreamIsCapturing");
    FIND(given);
    *status = stream->capture == NULL  ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture_broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                       : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    LEAVE(CUDA_SUCCESS);
}

static void free_graph(CUgraph graph) {
    free_ops(graph->first);
    graph->first = graph->last = NULL;
    graph->live = false;  /* kept: events may have been recorded in it */
    live_graphs--;
}

EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream given, CUgraph *graph) {
    ENTER("cuStreamEndCapture");
    FIND(given);
    *graph = NULL;
    if (stream->capture == NULL) LEAVE(CUDA_ERROR_ILLEGAL_STATE);
    CUgraph made = stream->capture;
    stream->capture = NULL;
    if (stream->capture_broken) {
        free_graph(made);
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    *graph = made;
    LEAVE(CUDA_SUCCESS);
}

static CUresult instantiate(CUgraphExec *exec, CUgraph graph) {
    if (!graph->live) return CUDA_ERROR_INVALID_HANDLE;
    CUgraphExec made = calloc(1, sizeof *made);
    Op *last = NULL;
    for (Op *op = graph->first; op != NULL; op = op->next) append(&made->first, &last, copy_of(op));
    made->live = true;
    live_execs++;
    *exec = made;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    (void)flags;
    ENTER("cuGraphInstantiate");
    LEAVE(instantiate(exec, graph));
}

EXPORT CUresult CUDAAPI cuGraphUpload(CUgraphExec exec, CUstream given) {
    ENTER("cuGraphUpload");
    FIND(given);
    LEAVE(exec->live ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

EXPORT CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec, CUstream given) {
    ENTER("cuGraphLaunch");
    FIND(given);
    if (!exec->live) {
        standin_complain("cuGraphLaunch: destroyed before");
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    }
    if (stream->capture != NULL) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    for (Op *op = exec->first; op != NULL; op = op->next) {
        append(&stream->first, &stream->last, copy_of(op));
        stream->issued++;
    }
    launches++;
    LEAVE(async_error);
}

EXPORT CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
    ENTER("cuGraphDestroy");
    if (!graph->live) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    free_graph(graph);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec) {
    ENTER("cuGraphExecDestroy");
    if (!exec->live) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    free_ops(exec->first);
    exec->first = NULL;
    exec->live = false;
    live_execs--;
    LEAVE(CUDA_SUCCESS);
}

/* What tests and the tensorrt double call (see driver.py). */

EXPORT void rig_set_runner(RunKernel runner) { run_kernel = runner; }

/* Put kernel `id` into a stream's queue, or into the graph that it captures. */
EXPORT int rig_launch(CUstream given, uint64_t id) {
    ENTER("enqueue");
    FIND(given);
    Kernel *kernel = malloc(sizeof *kernel);
    *kernel = (Kernel){id, 1};
    CUresult issued = standin_issue(stream, (Op){.verb = KERNEL, .kernel = kernel});
    if (issued != CUDA_SUCCESS) free(kernel);
    LEAVE(issued != CUDA_SUCCESS ? issued : async_error);
}

EXPORT int rig_is_capturing(CUstream given) {
    pthread_mutex_lock(&standin_lock);
    CUstream stream = standin_stream(given);
    int capturing = stream != NULL && stream->capture != NULL;
    pthread_mutex_unlock(&standin_lock);
    return capturing;
}

/* Kernels that nothing refers to any more. */
EXPORT size_t rig_take_released(uint64_t *ids, size_t room) {
    pthread_mutex_lock(&standin_lock);
    size_t count = released_count < room ? released_count : room;
    memcpy(ids, released, count * sizeof *ids);
    memmove(released, released + count, (released_count - count) * sizeof *ids);
    released_count -= count;
    pthread_mutex_unlock(&standin_lock);
    return count;
}

EXPORT long rig_live(int what) {
    pthread_mutex_lock(&standin_lock);
    long values[] = {live_streams, live_events, live_graphs, live_execs, launches};
    pthread_mutex_unlock(&standin_lock);
    return values[what];
}

/* A device that failed stays failed until its process ends; tests forgive it. */
EXPORT int rig_forgive(void) {
    pthread_mutex_lock(&standin_lock);
    int forgiven = (int)async_error;
    async_error = CUDA_SUCCESS;
    pthread_mutex_unlock(&standin_lock);
    return forgiven;
}

EXPORT uint64_t rig_pending(void) {
    uint64_t pending = 0;
    pthread_mutex_lock(&standin_lock);
    for (CUstream each = streams; each != NULL; each = each->next) pending += each->issued - each->done;
    pthread_mutex_unlock(&standin_lock);
    return pending;
}

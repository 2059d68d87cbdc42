/* Memory of the stand-in: allocations counted to the byte, and copies that may not leave them. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

#define MAX_ALLOCATIONS 4096
#define DEVICE_ALIGNMENT 512
#define PAGE 4096

size_t standin_total_memory = (size_t)8 << 30;

static Allocation allocations[MAX_ALLOCATIONS];
static size_t used;
static size_t live_bytes[3], live_count[3], peak_bytes, orphans, pageable_copies;

Allocation *standin_find(uintptr_t address) {
    for (size_t i = 0; i < used; i++) {
        Allocation *each = &allocations[i];
        if (address >= each->base && address - each->base < each->size) return each;
    }
    return NULL;
}

static Allocation *at_base(uintptr_t base, Kind kind) {
    for (size_t i = 0; i < used; i++) {
        if (allocations[i].base == base && allocations[i].kind == kind) return &allocations[i];
    }
    return NULL;
}

static void add(uintptr_t base, size_t size, Kind kind) {
    allocations[used++] = (Allocation){base, size, kind, standin_current()};
    live_bytes[kind] += size;
    live_count[kind]++;
    if (kind == DEVICE_MEMORY && live_bytes[kind] > peak_bytes) peak_bytes = live_bytes[kind];
}

static void drop(Allocation *allocation) {
    live_bytes[allocation->kind] -= allocation->size;
    live_count[allocation->kind]--;
    if (allocation->kind != REGISTERED_MEMORY) free((void *)allocation->base);
    *allocation = allocations[--used];
}

void standin_free_owned_by(Context *owner) {
    for (size_t i = used; i-- > 0;) {
        if (allocations[i].owner != owner) continue;
        orphans++;
        standin_complain("context released: %zu bytes were never given back", allocations[i].size);
        drop(&allocations[i]);
    }
}

EXPORT CUresult CUDAAPI cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    ENTER("cuMemAlloc");
    CUresult forbidden = standin_forbidden_in_capture("cuMemAlloc");
    if (forbidden != CUDA_SUCCESS) LEAVE(forbidden);
    if (size == 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (used == MAX_ALLOCATIONS || size > standin_total_memory - live_bytes[DEVICE_MEMORY]) {
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    }
    void *memory = NULL;
    if (posix_memalign(&memory, DEVICE_ALIGNMENT, size) != 0) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    memset(memory, 0xFF, size);
    add((uintptr_t)memory, size, DEVICE_MEMORY);
    *pointer = (CUdeviceptr)(uintptr_t)memory;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemFree(CUdeviceptr pointer) {
    ENTER("cuMemFree");
    if (pointer == 0) LEAVE(CUDA_SUCCESS);
    standin_drain_idle();
    Allocation *found = at_base((uintptr_t)pointer, DEVICE_MEMORY);
    if (found == NULL) {
        standin_complain("cuMemFree: 0x%llx is no live allocation", (unsigned long long)pointer);
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    }
    drop(found);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemGetInfo(size_t *unused, size_t *total) {
    ENTER("cuMemGetInfo");
    *total = standin_total_memory;
    *unused = standin_total_memory - live_bytes[DEVICE_MEMORY];
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    ENTER("cuMemGetAddressRange");
    Allocation *found = standin_find((uintptr_t)pointer);
    if (found == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (base != NULL) *base = (CUdeviceptr)found->base;
    if (size != NULL) *size = found->size;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    ENTER("cuPointerGetAttribute");
    Allocation *found = standin_find((uintptr_t)pointer);
    if (found == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    bool device = found->kind == DEVICE_MEMORY;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned int *)value = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = found->owner->device; break;
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(void **)value = found->owner; break;
        default: LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    }
    LEAVE(CUDA_SUCCESS);
}

static CUresult host_alloc(void **pointer, size_t size, const char *name) {
    CUresult forbidden = standin_forbidden_in_capture(name);
    if (forbidden != CUDA_SUCCESS) return forbidden;
    if (size == 0) return CUDA_ERROR_INVALID_VALUE;
    if (used == MAX_ALLOCATIONS || posix_memalign(pointer, PAGE, size) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*pointer, 0xFF, size);
    add((uintptr_t)*pointer, size, HOST_MEMORY);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemAllocHost(void **pointer, size_t size) {
    ENTER("cuMemAllocHost");
    LEAVE(host_alloc(pointer, size, "cuMemAllocHost"));
}

EXPORT CUresult CUDAAPI cuMemHostAlloc(void **pointer, size_t size, unsigned int flags) {
    (void)flags;
    ENTER("cuMemHostAlloc");
    LEAVE(host_alloc(pointer, size, "cuMemHostAlloc"));
}

EXPORT CUresult CUDAAPI cuMemFreeHost(void *pointer) {
    ENTER("cuMemFreeHost");
    standin_drain_idle();
    Allocation *found = at_base((uintptr_t)pointer, HOST_MEMORY);
    if (found == NULL) {
        standin_complain("cuMemFreeHost: %p is no live allocation", pointer);
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    }
    drop(found);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned int flags) {
    (void)flags;
    ENTER("cuMemHostGetDevicePointer");
    if (standin_find((uintptr_t)host) == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *device = (CUdeviceptr)(uintptr_t)host;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostRegister(void *pointer, size_t size, unsigned int flags) {
    (void)flags;
    ENTER("cuMemHostRegister");
    CUresult forbidden = standin_forbidden_in_capture("cuMemHostRegister");
    if (forbidden != CUDA_SUCCESS) LEAVE(forbidden);
    if (pointer == NULL || size == 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    uintptr_t start = (uintptr_t)pointer;
    for (size_t i = 0; i < used; i++) {
        Allocation *each = &allocations[i];
        if (start < each->base + each->size && each->base < start + size) {
            LEAVE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
    }
    if (used == MAX_ALLOCATIONS) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    add(start, size, REGISTERED_MEMORY);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostUnregister(void *pointer) {
    ENTER("cuMemHostUnregister");
    standin_drain_idle();
    Allocation *found = at_base((uintptr_t)pointer, REGISTERED_MEMORY);
    if (found == NULL) {
        standin_complain("cuMemHostUnregister: %p is not registered", pointer);
        LEAVE(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
    drop(found);
    LEAVE(CUDA_SUCCESS);
}

/* Copies */

static size_t extent(const Side *side, size_t width, size_t rows, size_t slices) {
    return ((slices - 1) * side->height + rows - 1) * side->pitch + width;
}

bool standin_in_bounds(const Side *side, size_t width, size_t rows, size_t slices) {
    if (width == 0 || rows == 0 || slices == 0) return true;
    Allocation *found = standin_find(side->start);
    size_t need = extent(side, width, rows, slices);
    if (found == NULL) return side->host;  /* pageable: nobody knows its end */
    if (!side->host && found->kind == REGISTERED_MEMORY) return false;
    return need <= found->size - (side->start - found->base);
}

static bool locked(const Side *side) { return !side->host || standin_find(side->start) != NULL; }

void standin_run_copy(Op *op) {
    const char *from = op->snapshot != NULL ? op->snapshot : (const char *)op->from.start;
    size_t from_pitch = op->snapshot != NULL ? op->width : op->from.pitch;
    size_t from_height = op->snapshot != NULL ? op->rows : op->from.height;
    for (size_t slice = 0; slice < op->slices; slice++) {
        for (size_t row = 0; row < op->rows; row++) {
            char *to = (char *)op->to.start + (slice * op->to.height + row) * op->to.pitch;
            if (op->verb == COPY) {
                memmove(to, from + (slice * from_height + row) * from_pitch, op->width);
                continue;
            }
            for (size_t at = 0; at < op->width; at += op->element) memcpy(to + at, &op->value, op->element);
        }
    }
}

static CUresult copy(const char *name, Op op, CUstream stream, bool sync) {
    bool fits = op.verb == FILL || standin_in_bounds(&op.from, op.width, op.rows, op.slices);
    fits = fits && standin_in_bounds(&op.to, op.width, op.rows, op.slices);
    if (!fits) {
        standin_complain("%s: %zu × %zu × %zu bytes leave an allocation", name, op.slices, op.rows, op.width);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (op.width == 0 || op.rows == 0 || op.slices == 0) return standin_async_error();
    if (sync || stream == NULL || stream == CU_STREAM_LEGACY) {  /* waits for all streams that wait for it */
        CUresult drained = standin_drain_blocking(standin_current());
        if (drained != CUDA_SUCCESS) return drained;
        standin_run_copy(&op);
        return standin_async_error();
    }
    stream = standin_stream(stream);
    if (stream == NULL) return CUDA_ERROR_INVALID_HANDLE;
    bool pageable = op.verb == COPY && (!locked(&op.from) || !locked(&op.to));
    if (pageable && stream->capture != NULL) return standin_forbidden_in_capture(name);
    if (pageable) pageable_copies++;
    if (op.verb == COPY && !locked(&op.from)) {  /* pageable bytes are taken along at once */
        op.snapshot = malloc(op.width * op.rows * op.slices);
        Op taken = op;
        taken.snapshot = NULL;
        taken.to = (Side){(uintptr_t)op.snapshot, op.width, op.rows, true};
        standin_run_copy(&taken);
    }
    CUresult issued = standin_issue(stream, op);
    if (issued != CUDA_SUCCESS) return issued;
    if (op.verb == COPY && !locked(&op.to)) standin_drain(stream, stream->issued, true);
    return standin_async_error();
}

static CUresult linear(
    const char *name, CUdeviceptr to, bool to_host, CUdeviceptr from, bool from_host, size_t size, CUstream stream,
    bool sync
) {
    Op op = {.verb = COPY, .width = size, .rows = 1, .slices = 1};
    op.from = (Side){(uintptr_t)from, size, 1, from_host};
    op.to = (Side){(uintptr_t)to, size, 1, to_host};
    return copy(name, op, stream, sync);
}

#define ADDRESS(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

EXPORT CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
    ENTER("cuMemcpyHtoD");
    LEAVE(linear("cuMemcpyHtoD", to, false, ADDRESS(from), true, size, NULL, true));
}

EXPORT CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
    ENTER("cuMemcpyDtoH");
    LEAVE(linear("cuMemcpyDtoH", ADDRESS(to), true, from, false, size, NULL, true));
}

EXPORT CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER("cuMemcpyDtoD");
    LEAVE(linear("cuMemcpyDtoD", to, false, from, false, size, NULL, true));
}

EXPORT CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    ENTER("cuMemcpyHtoDAsync");
    LEAVE(linear("cuMemcpyHtoDAsync", to, false, ADDRESS(from), true, size, stream, false));
}

EXPORT CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER("cuMemcpyDtoHAsync");
    LEAVE(linear("cuMemcpyDtoHAsync", ADDRESS(to), true, from, false, size, stream, false));
}

EXPORT CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER("cuMemcpyDtoDAsync");
    LEAVE(linear("cuMemcpyDtoDAsync", to, false, from, false, size, stream, false));
}

static bool side(
    Side *out, CUmemorytype type, const void *host, CUdeviceptr device, size_t pitch, size_t height, size_t x,
    size_t y, size_t z
) {
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE) return false;
    out->host = type == CU_MEMORYTYPE_HOST;
    out->pitch = pitch;
    out->height = height;
    out->start = (out->host ? (uintptr_t)host : (uintptr_t)device) + (z * height + y) * pitch + x;
    return true;
}

/* A pitch or height of 0 stands for exactly as much as is copied; smaller ones would overlap. */
static bool pitched(const char *name, size_t *pitch, size_t *height, size_t x, size_t y, const CUDA_MEMCPY3D *p) {
    if (*pitch == 0) *pitch = x + p->WidthInBytes;
    if (*height == 0) *height = y + p->Height;
    bool fits = (*pitch >= x + p->WidthInBytes || (p->Height <= 1 && p->Depth <= 1)) &&
                (*height >= y + p->Height || p->Depth <= 1) && *pitch <= 2147483647;
    if (!fits) standin_complain("%s: pitch %zu or height %zu is too small or too large", name, *pitch, *height);
    return fits;
}

static CUresult copy_3d(const char *name, const CUDA_MEMCPY3D *p, CUstream stream, bool sync) {
    CUDA_MEMCPY3D all = *p;
    Op op = {.verb = COPY, .width = p->WidthInBytes, .rows = p->Height, .slices = p->Depth};
    if (!pitched(name, &all.srcPitch, &all.srcHeight, p->srcXInBytes, p->srcY, p) ||
        !pitched(name, &all.dstPitch, &all.dstHeight, p->dstXInBytes, p->dstY, p) || p->srcLOD || p->dstLOD ||
        !side(&op.from, p->srcMemoryType, p->srcHost, p->srcDevice, all.srcPitch, all.srcHeight, p->srcXInBytes,
              p->srcY, p->srcZ) ||
        !side(&op.to, p->dstMemoryType, p->dstHost, p->dstDevice, all.dstPitch, all.dstHeight, p->dstXInBytes,
              p->dstY, p->dstZ)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return copy(name, op, stream, sync);
}

static CUDA_MEMCPY3D as_3d(const CUDA_MEMCPY2D *p) {
    return (CUDA_MEMCPY3D){
        .srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcMemoryType = p->srcMemoryType, .srcHost = p->srcHost,
        .srcDevice = p->srcDevice, .srcPitch = p->srcPitch, .dstXInBytes = p->dstXInBytes, .dstY = p->dstY,
        .dstMemoryType = p->dstMemoryType, .dstHost = p->dstHost, .dstDevice = p->dstDevice,
        .dstPitch = p->dstPitch, .WidthInBytes = p->WidthInBytes, .Height = p->Height, .Depth = 1,
    };
}

EXPORT CUresult CUDAAPI cuMemcpy3D(const CUDA_MEMCPY3D *p) {
    ENTER("cuMemcpy3D");
    LEAVE(copy_3d("cuMemcpy3D", p, NULL, true));
}

EXPORT CUresult CUDAAPI cuMemcpy3DAsync(const CUDA_MEMCPY3D *p, CUstream stream) {
    ENTER("cuMemcpy3DAsync");
    LEAVE(copy_3d("cuMemcpy3DAsync", p, stream, false));
}

EXPORT CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D *p) {
    ENTER("cuMemcpy2D");
    CUDA_MEMCPY3D all = as_3d(p);
    LEAVE(copy_3d("cuMemcpy2D", &all, NULL, true));
}

EXPORT CUresult CUDAAPI cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *p) {
    ENTER("cuMemcpy2DUnaligned");
    CUDA_MEMCPY3D all = as_3d(p);
    LEAVE(copy_3d("cuMemcpy2DUnaligned", &all, NULL, true));
}

EXPORT CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D *p, CUstream stream) {
    ENTER("cuMemcpy2DAsync");
    CUDA_MEMCPY3D all = as_3d(p);
    LEAVE(copy_3d("cuMemcpy2DAsync", &all, stream, false));
}

static CUresult fill(
    const char *name, CUdeviceptr to, uint32_t value, size_t element, size_t count, CUstream stream, bool sync
) {
    Op op = {.verb = FILL, .value = value, .element = element, .width = count * element, .rows = 1, .slices = 1};
    op.to = (Side){(uintptr_t)to, op.width, 1, false};
    if (to % element != 0) return CUDA_ERROR_INVALID_VALUE;
    return copy(name, op, stream, sync);
}

#define MEMSET(name, type)                                                                                \
    EXPORT CUresult CUDAAPI name(CUdeviceptr to, type value, size_t count) {                              \
        ENTER(#name);                                                                                     \
        LEAVE(fill(#name, to, value, sizeof(type), count, NULL, true));                                   \
    }
#define MEMSET_ASYNC(name, type)                                                                          \
    EXPORT CUresult CUDAAPI name(CUdeviceptr to, type value, size_t count, CUstream stream) {             \
        ENTER(#name);                                                                                     \
        LEAVE(fill(#name, to, value, sizeof(type), count, stream, false));                                \
    }

MEMSET(cuMemsetD8, unsigned char)
MEMSET(cuMemsetD16, unsigned short)
MEMSET(cuMemsetD32, unsigned int)
MEMSET_ASYNC(cuMemsetD8Async, unsigned char)
MEMSET_ASYNC(cuMemsetD16Async, unsigned short)
MEMSET_ASYNC(cuMemsetD32Async, unsigned int)

/* What tests call (see driver.py). */

EXPORT size_t rig_memory(int what) {
    pthread_mutex_lock(&standin_lock);
    size_t values[] = {
        live_bytes[DEVICE_MEMORY], live_count[DEVICE_MEMORY], peak_bytes, live_bytes[HOST_MEMORY],
        live_bytes[REGISTERED_MEMORY], orphans, pageable_copies,
    };
    pthread_mutex_unlock(&standin_lock);
    return values[what];
}

/* Free what a library allocated, whatever context is current, and without failing on cue. */
EXPORT void rig_release(uintptr_t address) {
    pthread_mutex_lock(&standin_lock);
    standin_drain_idle();
    Allocation *found = at_base(address, DEVICE_MEMORY);
    if (found != NULL) drop(found);
    else standin_complain("a library freed 0x%zx, which is no live allocation", (size_t)address);
    pthread_mutex_unlock(&standin_lock);
}

EXPORT void rig_restart_peak(void) {
    pthread_mutex_lock(&standin_lock);
    peak_bytes = live_bytes[DEVICE_MEMORY];
    pthread_mutex_unlock(&standin_lock);
}

/* Bytes from `address` to the end of its device allocation; 0 if it lies in none. */
EXPORT size_t rig_room(uintptr_t address) {
    pthread_mutex_lock(&standin_lock);
    Allocation *found = standin_find(address);
    size_t room = found == NULL || found->kind != DEVICE_MEMORY ? 0 : found->base + found->size - address;
    pthread_mutex_unlock(&standin_lock);
    return room;
}

/* A stand-in for libcuda.so.1 over malloc and memcpy: entry, devices, contexts, and the tests' own calls.
 *
 * It is strict where a GPU would be fast: no context current on the calling thread is an error, a copy that leaves
 * its allocation is an error, fresh memory holds 0xFF (NaN in every float), and asynchronous work runs as late as
 * the rules allow, when somebody waits for it, so that a missing wait shows. Calls it does not know answer
 * CUDA_ERROR_NOT_SUPPORTED (see stubs made by build.py).
 */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAMES 256
#define MAX_DEPTH 64
#define MAX_FAILURES 16

typedef struct Counter {
    const char *name;
    long calls;
} Counter;

typedef struct Failure {
    char name[64];  /* "" = unused; "*" = any call */
    long after;     /* fails when this reaches 0 … */
    long times;     /* … and this often */
    CUresult result;
} Failure;

pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;

static Counter counters[MAX_NAMES];
static Failure failures[MAX_FAILURES];
static char complaints[16384];
static Context primary[MAX_DEVICES];
static int device_count = 1, major = 8, minor = 0, driver_version = 13000;
static bool initialised;
static char device_name[128] = "Stand-in GPU";
extern size_t standin_total_memory;

static __thread Context *stack[MAX_DEPTH];
static __thread int depth;

void standin_complain(const char *format, ...) {
    size_t used = strlen(complaints);
    va_list arguments;
    va_start(arguments, format);
    if (used + 2 < sizeof complaints) {
        int wrote = vsnprintf(complaints + used, sizeof complaints - used - 1, format, arguments);
        if (wrote > 0) strncat(complaints, "\n", sizeof complaints - strlen(complaints) - 1);
    }
    va_end(arguments);
}

static void count(const char *name) {
    for (int i = 0; i < MAX_NAMES; i++) {
        if (counters[i].name == NULL) counters[i].name = name;
        if (strcmp(counters[i].name, name) == 0) {
            counters[i].calls++;
            return;
        }
    }
}

static CUresult asked_for_failure(const char *name) {
    CUresult found = CUDA_SUCCESS;
    for (int i = 0; i < MAX_FAILURES; i++) {
        Failure *failure = &failures[i];
        if (failure->name[0] == '\0' || (strcmp(failure->name, "*") && strcmp(failure->name, name))) continue;
        if (--failure->after > 0) continue;
        if (--failure->times == 0) failure->name[0] = '\0';
        found = failure->result;
    }
    return found;
}

Context *standin_current(void) {
    Context *top = depth > 0 ? stack[depth - 1] : NULL;
    return top != NULL && top->retained > 0 ? top : NULL;
}

CUresult standin_enter(const char *name, bool wants_context) {
    pthread_mutex_lock(&standin_lock);
    count(name);
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (wants_context && standin_current() == NULL) {
        standin_complain("%s: no context is current on the calling thread", name);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    return asked_for_failure(name);
}

CUresult standin_leave(CUresult result) {
    pthread_mutex_unlock(&standin_lock);
    return result;
}

EXPORT CUresult CUDAAPI cuInit(unsigned int flags) {
    pthread_mutex_lock(&standin_lock);
    count("cuInit");
    CUresult failed = asked_for_failure("cuInit");
    if (failed == CUDA_SUCCESS && flags != 0) failed = CUDA_ERROR_INVALID_VALUE;
    if (failed == CUDA_SUCCESS && device_count == 0) failed = CUDA_ERROR_NO_DEVICE;
    initialised = initialised || failed == CUDA_SUCCESS;
    LEAVE(failed);
}

EXPORT CUresult CUDAAPI cuDriverGetVersion(int *version) {
    *version = driver_version;
    return CUDA_SUCCESS;
}

static bool known(CUdevice device) { return device >= 0 && device < device_count; }

EXPORT CUresult CUDAAPI cuDeviceGetCount(int *found) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGetCount");
    *found = device_count;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGet");
    if (!known(ordinal)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGetName(char *name, int size, CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGetName");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)size, "%s", device_name);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGetPCIBusId(char *id, int size, CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGetPCIBusId");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    snprintf(id, (size_t)size, "0000:%02x:00.0", device + 1);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGetUuid");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    memset(uuid, 0x40 + device, sizeof *uuid);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDeviceTotalMem");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *bytes = standin_total_memory;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceComputeCapability(int *out_major, int *out_minor, CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDeviceComputeCapability");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *out_major = major;
    *out_minor = minor;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGetAttribute");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = major; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = minor; break;
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *value = 2147483647; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 108; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = device + 1; break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: *value = 1; break;
        default: *value = 0;
    }
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDevicePrimaryCtxRetain");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    primary[device].device = device;
    primary[device].retained++;
    *context = (CUcontext)&primary[device];
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER_WITHOUT_CONTEXT("cuDevicePrimaryCtxRelease");
    if (device < 0 || device >= MAX_DEVICES) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (primary[device].retained == 0) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (primary[device].retained == 1) {  /* the last one: what was made in it goes with it */
        standin_drop_streams(&primary[device]);
        standin_free_owned_by(&primary[device]);
    }
    primary[device].retained--;
    LEAVE(CUDA_SUCCESS);
}

/* pycuda calls this when its context object dies, at the end of the process; it does not name the device. */
EXPORT CUresult CUDAAPI cuCtxDetach(CUcontext context) {
    (void)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    ENTER_WITHOUT_CONTEXT("cuDevicePrimaryCtxGetState");
    if (!known(device)) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *flags = 0;
    *active = primary[device].retained > 0;
    LEAVE(CUDA_SUCCESS);
}

static bool valid(CUcontext context) {
    Context *given = (Context *)context;
    return given >= primary && given < primary + MAX_DEVICES && given->retained > 0;
}

EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
    ENTER_WITHOUT_CONTEXT("cuCtxPushCurrent");
    if (!valid(context)) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (depth == MAX_DEPTH) {
        standin_complain("cuCtxPushCurrent: %d contexts pushed and never popped", depth);
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    }
    stack[depth++] = (Context *)context;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context) {
    ENTER_WITHOUT_CONTEXT("cuCtxPopCurrent");
    if (depth == 0) {
        standin_complain("cuCtxPopCurrent: no context is current on the calling thread");
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    }
    depth--;
    if (context != NULL) *context = (CUcontext)stack[depth];
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    ENTER_WITHOUT_CONTEXT("cuCtxSetCurrent");
    if (context != NULL && !valid(context)) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (depth > 0) depth--;
    if (context != NULL) stack[depth++] = (Context *)context;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) {
    ENTER_WITHOUT_CONTEXT("cuCtxGetCurrent");
    *context = (CUcontext)standin_current();
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) {
    ENTER("cuCtxGetDevice");
    *device = standin_current()->device;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxGetApiVersion(CUcontext context, unsigned int *version) {
    (void)context;
    *version = 3020;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cuCtxGetStreamPriorityRange");
    if (least != NULL) *least = 0;
    if (greatest != NULL) *greatest = -5;
    LEAVE(CUDA_SUCCESS);
}

static const struct {
    CUresult result;
    const char *name, *text;
} results[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
};

EXPORT CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        if (results[i].result == error) {
            *name = results[i].name;
            return CUDA_SUCCESS;
        }
    }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        if (results[i].result == error) {
            *text = results[i].text;
            return CUDA_SUCCESS;
        }
    }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

/* Made by build.py from the header: the name in the documentation → the newest form of it. */
extern const char *const standin_versions[][2];

EXPORT CUresult CUDAAPI cuGetProcAddress(
    const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status
) {
    (void)version;
    (void)flags;
    const char *name = symbol;
    for (int i = 0; standin_versions[i][0] != NULL; i++) {
        if (strcmp(standin_versions[i][0], symbol) == 0) name = standin_versions[i][1];
    }
    Dl_info self;
    void *library = NULL;
    if (dladdr((void *)&cuInit, &self) != 0) library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = library != NULL ? dlsym(library, name) : NULL;
    if (library != NULL) dlclose(library);
    if (status != NULL) {
        *status = *function != NULL ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* What tests call (see driver.py). */

EXPORT void rig_fail(const char *name, long nth, long times, int result) {
    pthread_mutex_lock(&standin_lock);
    for (int i = 0; i < MAX_FAILURES; i++) {
        if (failures[i].name[0] == '\0') {
            snprintf(failures[i].name, sizeof failures[i].name, "%s", name);
            failures[i].after = nth;
            failures[i].times = times;
            failures[i].result = (CUresult)result;
            break;
        }
    }
    pthread_mutex_unlock(&standin_lock);
}

/* Forget failures asked for; how many had not come. */
EXPORT int rig_forget_failures(void) {
    int left = 0;
    pthread_mutex_lock(&standin_lock);
    for (int i = 0; i < MAX_FAILURES; i++) left += failures[i].name[0] != '\0';
    memset(failures, 0, sizeof failures);
    pthread_mutex_unlock(&standin_lock);
    return left;
}

EXPORT long rig_calls(const char *name) {
    long calls = 0;
    pthread_mutex_lock(&standin_lock);
    for (int i = 0; i < MAX_NAMES && counters[i].name != NULL; i++) {
        if (strcmp(counters[i].name, name) == 0 || strcmp(name, "*") == 0) calls += counters[i].calls;
    }
    pthread_mutex_unlock(&standin_lock);
    return calls;
}

EXPORT void rig_take_complaints(char *text, size_t size) {
    pthread_mutex_lock(&standin_lock);
    snprintf(text, size, "%s", complaints);
    complaints[0] = '\0';
    pthread_mutex_unlock(&standin_lock);
}

EXPORT void rig_complain(const char *text) {
    pthread_mutex_lock(&standin_lock);
    standin_complain("%s", text);
    pthread_mutex_unlock(&standin_lock);
}

EXPORT void rig_set_device(int devices, int new_major, int new_minor, const char *name, size_t total) {
    pthread_mutex_lock(&standin_lock);
    device_count = devices < MAX_DEVICES ? devices : MAX_DEVICES;
    major = new_major;
    minor = new_minor;
    snprintf(device_name, sizeof device_name, "%s", name);
    standin_total_memory = total;
    pthread_mutex_unlock(&standin_lock);
}

/* The ordinal of the device whose context is current on this thread, else -1. */
EXPORT int rig_current_device(void) {
    pthread_mutex_lock(&standin_lock);
    Context *current = standin_current();
    int device = current == NULL ? -1 : current->device;
    pthread_mutex_unlock(&standin_lock);
    return device;
}

EXPORT int rig_context_depth(void) { return depth; }

EXPORT int rig_contexts_retained(void) {
    int retained = 0;
    pthread_mutex_lock(&standin_lock);
    for (int i = 0; i < MAX_DEVICES; i++) retained += primary[i].retained;
    pthread_mutex_unlock(&standin_lock);
    return retained;
}

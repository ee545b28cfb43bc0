/* Emulates libcuda.so.1 on top of the preloaded runtime: devices, primary contexts, and the virtual-memory calls for
 * expandable segments. */
#define _GNU_SOURCE
#include "bridge.h"
#include "node.h"
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long u64;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       NOT_FOUND = 500, NOT_SUPPORTED = 801 };
enum { POINTER_MAPPED = 13 };
enum { PAGE = 2 << 20 };

static struct emu_bridge *bridge(void) {
    static struct emu_bridge *found;
    if (!found) found = dlsym(RTLD_DEFAULT, "emu_bridge");
    return found;
}

#define ENTER(function)                                        \
    do {                                                       \
        int entered_ = bridge() ? bridge()->enter(function) : NOT_INITIALIZED; \
        if (entered_) return entered_;                         \
    } while (0)
#define DEVICE(ordinal) \
    do {                \
        if ((ordinal) < 0 || (ordinal) >= bridge()->count()) return INVALID_DEVICE; \
    } while (0)

int cuInit(unsigned flags) {
    (void)flags;
    ENTER("cuInit");
    return OK;
}
int cuDriverGetVersion(int *version) {
    struct emu_node *node = emu_node();
    *version = node ? node->state->cuda_version : 0;
    return OK;
}
int cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount");
    *count = bridge()->count();
    return OK;
}
int cuDeviceGet(int *device, int ordinal) {
    ENTER("cuDeviceGet");
    DEVICE(ordinal);
    *device = ordinal;
    return OK;
}
int cuDeviceGetName(char *name, int size, int device) {
    ENTER("cuDeviceGetName");
    DEVICE(device);
    snprintf(name, (size_t)size, "%s", emu_node()->state->device[bridge()->entry(device)].name);
    return OK;
}
int cuDeviceGetUuid_v2(char *bytes, int device) {
    ENTER("cuDeviceGetUuid_v2");
    DEVICE(device);
    emu_uuid_bytes(emu_node()->state->device[bridge()->entry(device)].uuid, bytes);
    return OK;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER("cuDeviceTotalMem_v2");
    DEVICE(device);
    struct emu_device *entry = &emu_node()->state->device[bridge()->entry(device)];
    *bytes = entry->total - entry->reserved;
    return OK;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER("cuDeviceGetAttribute");
    DEVICE(device);
    switch (attribute) {
        case 16: *value = 132; break; /* multiprocessors */
        case 75: *value = 9; break;   /* compute capability, major */
        case 102: *value = 1; break;  /* virtual memory management */
        default: *value = 0;
    }
    return OK;
}

/* The handles of contexts are numbers, starting at one. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER("cuDevicePrimaryCtxGetState");
    DEVICE(device);
    *flags = 0;
    *active = bridge()->has_context(device);
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    DEVICE(device);
    int created = bridge()->create_context(device);
    if (created) return created;
    *context = (void *)(intptr_t)(device + 1);
    return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER("cuDevicePrimaryCtxRelease_v2");
    DEVICE(device);
    return OK; /* the runtime retains it too, until cudaDeviceReset */
}
static __thread void *current_context;
int cuCtxGetCurrent(void **context) {
    ENTER("cuCtxGetCurrent");
    int device = bridge()->current();
    *context = current_context ? current_context : bridge()->has_context(device) ? (void *)(intptr_t)(device + 1) : NULL;
    return OK;
}
int cuCtxSetCurrent(void *context) {
    ENTER("cuCtxSetCurrent");
    current_context = context;
    return OK;
}
int cuGetErrorString(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error ? "error of the emulated driver" : "no error";
    return OK;
}
int cuGetErrorName(int error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS";
    return OK;
}

/* vLLM's extensions are linked with these two. Their kernels never run. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, u64 flags, int *status) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (status) *status = *function ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return *function ? OK : NOT_FOUND;
}
int cuTensorMapEncodeTiled(void) { return OK; } /* of a map that no kernel reads */

/* The emulated driver logs nothing. */
int cuLogsRegisterCallback(void *callback, void *data, void **handle) {
    (void)callback, (void)data;
    if (handle) *handle = NULL;
    return OK;
}
int cuLogsUnregisterCallback(void *handle) {
    (void)handle;
    return OK;
}

/* Physical memory is freed when its owner has released it and it is not mapped. */
struct physical {
    size_t bytes;
    int device, references;
};
struct mapping {
    u64 address;
    size_t bytes;
    struct physical *physical;
    struct mapping *next;
};
enum { BUCKETS = 4096 };
struct reservation {
    u64 address;
    size_t bytes;
    struct reservation *next;
};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings[BUCKETS];
static struct reservation *reservations;

static struct mapping **bucket(u64 address) { return &mappings[address / PAGE % BUCKETS]; }

static void unreference(struct physical *physical) {
    if (--physical->references) return;
    bridge()->give(physical->device, physical->bytes);
    free(physical);
}

struct properties { /* the beginning of CUmemAllocationProp */
    int type, handle_types;
    struct {
        int type, id;
    } location;
};

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    (void)properties, (void)option;
    ENTER("cuMemGetAllocationGranularity");
    *bytes = PAGE;
    return OK;
}
int cuMemAddressReserve(u64 *address, size_t bytes, size_t alignment, u64 wanted, u64 flags) {
    (void)wanted, (void)flags;
    ENTER("cuMemAddressReserve");
    size_t step = alignment > PAGE ? alignment : PAGE, room = bytes + step;
    char *space = mmap(0, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return OUT_OF_MEMORY;
    char *aligned = (char *)(((uintptr_t)space + step - 1) / step * step);
    if (aligned > space) munmap(space, (size_t)(aligned - space));
    if (space + room > aligned + bytes) munmap(aligned + bytes, (size_t)(space + room - (aligned + bytes)));
    *address = (u64)(uintptr_t)aligned;
    struct reservation *reservation = malloc(sizeof *reservation);
    pthread_mutex_lock(&mutex);
    *reservation = (struct reservation){*address, bytes, reservations};
    reservations = reservation;
    pthread_mutex_unlock(&mutex);
    return OK;
}
int cuMemAddressFree(u64 address, size_t bytes) {
    ENTER("cuMemAddressFree");
    pthread_mutex_lock(&mutex);
    struct reservation **link = &reservations;
    while (*link && (*link)->address != address) link = &(*link)->next;
    struct reservation *reservation = *link;
    if (reservation) *link = reservation->next;
    pthread_mutex_unlock(&mutex);
    free(reservation);
    return munmap((void *)(uintptr_t)address, bytes) ? INVALID_VALUE : OK;
}
int cuMemCreate(u64 *handle, size_t bytes, const struct properties *properties, u64 flags) {
    (void)flags;
    ENTER("cuMemCreate");
    int device = properties->location.id;
    DEVICE(device);
    if (!bytes || bytes % PAGE) return INVALID_VALUE;
    if (bridge()->create_context(device) || !bridge()->take(device, bytes)) return OUT_OF_MEMORY;
    struct physical *physical = malloc(sizeof *physical);
    *physical = (struct physical){bytes, device, 1};
    *handle = (u64)(uintptr_t)physical;
    return OK;
}
int cuMemRelease(u64 handle) {
    ENTER("cuMemRelease");
    pthread_mutex_lock(&mutex);
    unreference((struct physical *)(uintptr_t)handle);
    pthread_mutex_unlock(&mutex);
    return OK;
}
int cuMemMap(u64 address, size_t bytes, size_t offset, u64 handle, u64 flags) {
    (void)offset, (void)flags;
    ENTER("cuMemMap");
    struct mapping *mapping = malloc(sizeof *mapping);
    pthread_mutex_lock(&mutex);
    *mapping = (struct mapping){address, bytes, (struct physical *)(uintptr_t)handle, *bucket(address)};
    mapping->physical->references++;
    *bucket(address) = mapping;
    pthread_mutex_unlock(&mutex);
    return OK;
}
/* One call may undo several adjacent mappings. */
int cuMemUnmap(u64 address, size_t bytes) {
    ENTER("cuMemUnmap");
    u64 end = address + bytes, at = address;
    pthread_mutex_lock(&mutex);
    while (at < end) {
        struct mapping **link = bucket(at);
        while (*link && (*link)->address != at) link = &(*link)->next;
        if (!*link) break;
        struct mapping *mapping = *link;
        *link = mapping->next;
        at += mapping->bytes;
        unreference(mapping->physical);
        free(mapping);
    }
    pthread_mutex_unlock(&mutex);
    if (at != end) return INVALID_VALUE;
    madvise((void *)(uintptr_t)address, bytes, MADV_DONTNEED);
    mprotect((void *)(uintptr_t)address, bytes, PROT_NONE);
    return OK;
}
/* Only CU_POINTER_ATTRIBUTE_MAPPED. An address outside of every reservation belongs to the runtime, and is mapped. */
int cuPointerGetAttribute(void *data, int attribute, u64 address) {
    ENTER("cuPointerGetAttribute");
    if (attribute != POINTER_MAPPED) return NOT_SUPPORTED;
    pthread_mutex_lock(&mutex);
    struct reservation *reservation = reservations;
    while (reservation && address - reservation->address >= reservation->bytes) reservation = reservation->next;
    struct mapping *mapping = *bucket(address);
    while (mapping && mapping->address != address) mapping = mapping->next;
    *(unsigned *)data = !reservation || mapping;
    pthread_mutex_unlock(&mutex);
    return OK;
}
int cuMemSetAccess(u64 address, size_t bytes, const void *access, size_t count) {
    (void)access, (void)count;
    ENTER("cuMemSetAccess");
    return mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}

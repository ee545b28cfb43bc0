/* The visible devices of a process, and its primary contexts. A process uses memory from its first context on; counting
 * devices and reading their properties use none. */
#define _GNU_SOURCE
#include "bridge.h"
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int initialized, forked, slot = -1, visible[EMU_MAX_DEVICES], visible_count;
static cudaError_t init_result;
static uint64_t contexts; /* bit per visible device */
static __thread int current;
static __thread cudaError_t last_error;

cudaError_t rt_fail(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

int rt_current(void) { return current; }
int rt_entry(int device) { return visible[device]; }
int rt_device_count(void) { return visible_count; }
int rt_slot(void) { return slot; }
int rt_has_context(int device) { return (int)(__atomic_load_n(&contexts, __ATOMIC_ACQUIRE) >> device & 1); }
int emu_own_slot(void) { return forked ? -1 : slot; }

/* The parent's contexts are invalid in a forked child, where every CUDA call fails. */
static void in_forked_child(void) {
    pthread_mutex_init(&mutex, NULL);
    if (initialized) forked = 1;
}

/* The entry for one word of CUDA_VISIBLE_DEVICES (an index or a unique prefix of a UUID), or -1. */
static int named_entry(struct emu_state *state, const char *word) {
    char *end;
    long index = strtol(word, &end, 10);
    if (*word && !*end) return index >= 0 && index < (long)state->physical ? (int)index : -1;
    int found = -1;
    if (strncmp(word, "GPU-", 4) && strncmp(word, "MIG-", 4)) return -1;
    for (uint32_t i = 0; i < state->entries; i++)
        if (!state->device[i].gone && !strncasecmp(state->device[i].uuid, word, strlen(word))) {
            if (found >= 0) return -1;
            found = (int)i;
        }
    return found;
}

/* Selects and orders devices by CUDA_VISIBLE_DEVICES; the first invalid word ends the list. */
static void choose_devices(struct emu_state *state) {
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!chosen) {
        for (uint32_t i = 0; i < state->physical; i++) {
            int entry = (int)i;
            if (state->device[i].mig_enabled) { /* of a GPU with MIG on, a process sees the first instance */
                entry = -1;
                for (uint32_t k = state->physical; k < state->entries && entry < 0; k++)
                    if (state->device[k].parent == (int)i && !state->device[k].gone) entry = (int)k;
            }
            visible[visible_count++] = entry;
        }
        return;
    }
    char *copy = strdup(chosen), *rest = copy, *word;
    while ((word = strsep(&rest, ","))) {
        while (*word == ' ') word++;
        word[strcspn(word, " ")] = 0;
        int entry = named_entry(state, word);
        if (entry < 0) break;
        for (int i = 0; i < visible_count; i++)
            if (visible[i] == entry) { /* a duplicate device: CUDA then sees no device */
                visible_count = 0;
                free(copy);
                return;
            }
        visible[visible_count++] = entry;
    }
    free(copy);
}

cudaError_t rt_enter(const char *function) {
    if (forked) return cudaErrorInitializationError;
    if (!__atomic_load_n(&initialized, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&mutex);
        if (!initialized) {
            pthread_atfork(NULL, NULL, in_forked_child);
            struct emu_node *node = emu_node();
            if (node) choose_devices(node->state);
            init_result = node && visible_count ? cudaSuccess : cudaErrorNoDevice;
            __atomic_store_n(&initialized, 1, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&mutex);
    }
    if (init_result != cudaSuccess) return init_result;
    return (cudaError_t)emu_gate(emu_node(), function, visible[current]);
}

cudaError_t rt_create_context(int device) {
    if (rt_has_context(device)) return cudaSuccess;
    cudaError_t result = cudaSuccess;
    pthread_mutex_lock(&mutex);
    if (slot < 0) slot = emu_claim(emu_node());
    if (slot < 0 || !emu_create_context(emu_node(), slot, visible[device])) result = cudaErrorMemoryAllocation;
    else __atomic_or_fetch(&contexts, 1ull << device, __ATOMIC_ACQ_REL);
    pthread_mutex_unlock(&mutex);
    return result;
}

cudaError_t rt_enter_context(const char *function) {
    cudaError_t result = rt_enter(function);
    return result == cudaSuccess ? rt_create_context(current) : result;
}

size_t rt_take(int device, size_t bytes) {
    if (bytes > SIZE_MAX - EMU_PAGE) return 0;
    size_t pages = (bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE;
    return emu_take(emu_node(), slot, visible[device], pages) ? pages : 0;
}

void rt_give(int device, size_t pages) { emu_give(emu_node(), slot, visible[device], pages); }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    ENTER("cudaGetDeviceCount");
    *count = visible_count;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    struct emu_node *node = emu_node();
    *version = node ? node->state->cuda_version : 0;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    ENTER("cudaGetDevice");
    *device = current;
    return cudaSuccess;
}

/* Since CUDA 12, selecting a device creates its primary context. */
cudaError_t cudaSetDevice(int device) {
    ENTER("cudaSetDevice");
    if (device < 0 || device >= visible_count) return rt_fail(cudaErrorInvalidDevice);
    cudaError_t created = rt_create_context(device);
    if (created != cudaSuccess) return rt_fail(created);
    current = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceReset(void) {
    ENTER("cudaDeviceReset");
    if (!rt_has_context(current)) return cudaSuccess;
    pthread_mutex_lock(&mutex);
    rt_forget_allocations(current);
    emu_reset(emu_node(), slot, visible[current]);
    __atomic_and_fetch(&contexts, ~(1ull << current), __ATOMIC_ACQ_REL);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER_CONTEXT("cudaDeviceSynchronize");
    SAFE_OR_FAIL();
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER_CONTEXT("cudaMemGetInfo");
    struct emu_device *device = &emu_node()->state->device[visible[current]];
    int64_t total = (int64_t)(device->total - device->reserved), free = total - emu_used(emu_node(), visible[current]);
    *total_bytes = (size_t)total;
    *free_bytes = free > 0 ? (size_t)free : 0;
    return cudaSuccess;
}

static int pci_bus(struct emu_state *state, int entry) {
    int parent = state->device[entry].parent;
    return (parent < 0 ? entry : parent) + 1;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    ENTER("cudaGetDeviceProperties");
    if (device < 0 || device >= visible_count) return rt_fail(cudaErrorInvalidDevice);
    struct emu_state *state = emu_node()->state;
    struct emu_device *entry = &state->device[visible[device]];
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", entry->name);
    emu_uuid_bytes(entry->uuid, p->uuid.bytes);
    p->totalGlobalMem = entry->total - entry->reserved;
    p->pciBusID = pci_bus(state, visible[device]);
    p->major = 9;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin = 227 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 50 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    ENTER("cudaDeviceGetPCIBusId");
    if (device < 0 || device >= visible_count) return rt_fail(cudaErrorInvalidDevice);
    snprintf(id, (size_t)size, "0000:%02X:00.0", pci_bus(emu_node()->state, visible[device]));
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    ENTER("cudaDeviceGetAttribute");
    if (device < 0 || device >= visible_count) return rt_fail(cudaErrorInvalidDevice);
    switch ((int)attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cudaDeviceGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER("cudaDeviceCanAccessPeer");
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}

static cudaError_t find_driver_entry(const char *symbol, void **function, enum cudaDriverEntryPointQueryResult *status) {
    ENTER("cudaGetDriverEntryPoint");
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, symbol) : NULL;
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (*function) return cudaSuccess;
    fprintf(stderr, "emulated node: the driver's %s is not emulated\n", symbol);
    return rt_fail(cudaErrorSymbolNotFound);
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    (void)flags;
    return find_driver_entry(symbol, function, status);
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    (void)version, (void)flags;
    return find_driver_entry(symbol, function, status);
}
#endif

/* Functions of the runtime for the emulated driver in the same process. */
static int bridge_enter(const char *function) { return (int)rt_enter(function); }
static int bridge_context(int device) { return (int)rt_create_context(device); }

struct emu_bridge emu_bridge = {
    .enter = bridge_enter,
    .create_context = bridge_context,
    .has_context = rt_has_context,
    .count = rt_device_count,
    .current = rt_current,
    .entry = rt_entry,
    .take = rt_take,
    .give = rt_give,
};

/* Emulates libnvidia-ml.so.1: the calls of pynvml, torch and monitoring tools, with values from the node's accounts.
 * Every other function that the installed pynvml knows returns "not supported". */
#define _GNU_SOURCE
#include "node.h"
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The layouts are those of nvml.h and of pynvml's ctypes structures. */
typedef int nvmlReturn_t;
typedef struct nvmlDevice *nvmlDevice_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
typedef struct {
    unsigned long long bar1Total, bar1Free, bar1Used;
} nvmlBAR1Memory_t;
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v3_t;
typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;
typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount,
        sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
};
static const unsigned NO_INSTANCE = ~0u;

/* One NVML session of this process: from the first nvmlInit to the last nvmlShutdown. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int session_references;
static uint32_t session_generation;
static int device_file = -1; /* open during a session, like /dev/nvidiactl */

static void open_device_file(void) {
    char path[PATH_MAX];
    const char *state = getenv("EMULATED_NODE");
    if (state && snprintf(path, sizeof path, "%s.nvidiactl", state) < (int)sizeof path)
        device_file = open(path, O_RDWR | O_CLOEXEC);
}

static nvmlReturn_t init(const char *function) {
    struct emu_node *node = emu_node();
    if (!node) return NVML_ERROR_DRIVER_NOT_LOADED;
    int error = emu_gate(node, function, EMU_ANY_DEVICE);
    if (!error) error = __atomic_load_n(&node->state->init_error, __ATOMIC_ACQUIRE);
    if (error) return error;
    pthread_mutex_lock(&mutex);
    if (!session_references++) {
        open_device_file();
        __atomic_store_n(&session_generation, __atomic_load_n(&node->state->generation, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&mutex);
    return NVML_SUCCESS;
}

/* The generated functions call this too (see build.py). */
__attribute__((visibility("hidden"))) int session_valid(void) {
    if (!__atomic_load_n(&session_references, __ATOMIC_ACQUIRE)) return 0;
    return __atomic_load_n(&session_generation, __ATOMIC_ACQUIRE) >=
           __atomic_load_n(&emu_node()->state->restart_generation, __ATOMIC_ACQUIRE);
}

static nvmlReturn_t begin(const char *function) {
    if (!session_valid()) return NVML_ERROR_UNINITIALIZED;
    int error = emu_gate(emu_node(), function, EMU_ANY_DEVICE);
    return error ? error : session_valid() ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

static nvmlReturn_t device_error(int entry) {
    struct emu_state *state = emu_node()->state;
    if (state->device[entry].parent >= 0) {
        nvmlReturn_t of_parent = device_error(state->device[entry].parent);
        if (of_parent) return of_parent;
    }
    int error = __atomic_load_n(&state->device[entry].nvml_error, __ATOMIC_ACQUIRE);
    if (error) return error;
    return session_generation < state->device[entry].lost_generation ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

static nvmlReturn_t begin_device(const char *function, nvmlDevice_t handle, int *entry) {
    if (!session_valid()) return NVML_ERROR_UNINITIALIZED;
    struct emu_node *node = emu_node();
    intptr_t number = (intptr_t)handle - 1;
    if (number < 0 || number >= (intptr_t)node->state->entries) return NVML_ERROR_INVALID_ARGUMENT;
    if (node->state->device[number].gone) return NVML_ERROR_INVALID_ARGUMENT;
    *entry = (int)number;
    int error = emu_gate(node, function, *entry);
    if (error) return error;
    return session_valid() ? device_error(*entry) : NVML_ERROR_UNINITIALIZED;
}

static nvmlReturn_t handle_of(int entry, nvmlDevice_t *handle) {
    nvmlReturn_t error = device_error(entry);
    if (!error) *handle = (nvmlDevice_t)(intptr_t)(entry + 1);
    return error;
}

#define BEGIN()                                  \
    do {                                         \
        nvmlReturn_t begun_ = begin(__func__);   \
        if (begun_ != NVML_SUCCESS) return begun_; \
    } while (0);                                 \
    struct emu_state *state = emu_node()->state; \
    (void)state
#define BEGIN_DEVICE(handle)                                           \
    int entry;                                                         \
    do {                                                               \
        nvmlReturn_t begun_ = begin_device(__func__, (handle), &entry); \
        if (begun_ != NVML_SUCCESS) return begun_;                     \
    } while (0);                                                       \
    struct emu_state *state = emu_node()->state;                       \
    struct emu_device *device = &state->device[entry];                 \
    (void)device

nvmlReturn_t nvmlInit_v2(void) { return init(__func__); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return init(__func__);
}
nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&mutex);
    nvmlReturn_t result = session_references ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (session_references && !--session_references && device_file >= 0) {
        close(device_file);
        device_file = -1;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
        case NVML_SUCCESS: return "Success";
        case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
        case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
        case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
        case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
        case NVML_ERROR_NOT_FOUND: return "Not Found";
        case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
        case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case NVML_ERROR_TIMEOUT: return "Timeout";
        case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
        case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
        case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
        case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
        default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned size) {
    BEGIN();
    snprintf(version, size, "%s", state->driver_version);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned size) {
    BEGIN();
    snprintf(version, size, "%d.%s", state->cuda_version / 1000, state->driver_version);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    BEGIN();
    *version = state->cuda_version;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    BEGIN();
    *version = state->cuda_version;
    return NVML_SUCCESS;
}

/* A lost device counts, but its handle is not available. */
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN();
    *count = state->physical;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *handle) {
    BEGIN();
    return index < state->physical ? handle_of(state->order[index], handle) : NVML_ERROR_INVALID_ARGUMENT;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
    BEGIN();
    for (uint32_t i = 0; i < state->entries; i++)
        if (!state->device[i].gone && !strcmp(state->device[i].uuid, uuid)) return handle_of((int)i, handle);
    return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *handle) {
    BEGIN();
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2) return NVML_ERROR_INVALID_ARGUMENT;
    if (domain || bus < 1 || bus > state->physical) return NVML_ERROR_NOT_FOUND;
    return handle_of((int)bus - 1, handle);
}

static int physical_of(struct emu_state *state, int entry) {
    return state->device[entry].parent < 0 ? entry : state->device[entry].parent;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned *index) {
    BEGIN_DEVICE(handle);
    if (device->parent >= 0) return NVML_ERROR_NOT_SUPPORTED;
    for (*index = 0; state->order[*index] != entry;) ++*index;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t handle, unsigned *number) {
    BEGIN_DEVICE(handle);
    *number = (unsigned)physical_of(state, entry);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned size) {
    BEGIN_DEVICE(handle);
    snprintf(name, size, "%s", device->name);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned size) {
    BEGIN_DEVICE(handle);
    if (strlen(device->uuid) >= size) return NVML_ERROR_INSUFFICIENT_SIZE;
    snprintf(uuid, size, "%s", device->uuid);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *pci) {
    BEGIN_DEVICE(handle);
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)physical_of(state, entry) + 1;
    pci->pciDeviceId = 0x233010de;
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus);
    return NVML_SUCCESS;
}

/* The first version of the call counts reserved bytes as used; the second returns them separately. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
    BEGIN_DEVICE(handle);
    memory->total = device->total;
    memory->used = (unsigned long long)(emu_used(emu_node(), entry) + (int64_t)device->reserved);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory) {
    BEGIN_DEVICE(handle);
    if (memory->version != (sizeof *memory | 2u << 24)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->used = (unsigned long long)emu_used(emu_node(), entry);
    memory->free = memory->total - memory->reserved - memory->used;
    memory->used += 1ull << 20; /* as on real drivers, the three values are rounded: their sum is not the total */
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t handle, nvmlBAR1Memory_t *memory) {
    BEGIN_DEVICE(handle);
    memory->bar1Total = 128ull << 30;
    memory->bar1Used = 2ull << 20;
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return NVML_SUCCESS;
}

/* Writes the processes of an entry, including those on its MIG devices, to one of the two arrays or to neither. */
static nvmlReturn_t processes_of(int entry, unsigned *count, nvmlProcessInfo_v1_t *plain, nvmlProcessInfo_v3_t *full) {
    struct emu_node *node = emu_node();
    struct emu_state *state = node->state;
    struct emu_use uses[EMU_MAX_PROCESSES];
    unsigned room = plain || full ? *count : 0, found = 0;
    for (uint32_t at = 0; at < state->entries; at++) {
        if ((int)at != entry && state->device[at].parent != entry) continue;
        int here = emu_uses(node, (int)at, uses, EMU_MAX_PROCESSES), child = state->device[at].parent >= 0;
        for (int i = 0; i < here; i++, found++) {
            if (found >= room) continue;
            if (plain) plain[found] = (nvmlProcessInfo_v1_t){(unsigned)uses[i].pid, uses[i].used};
            if (full)
                full[found] = (nvmlProcessInfo_v3_t){(unsigned)uses[i].pid, uses[i].used,
                                                     child ? (unsigned)state->device[at].gpu_instance : NO_INSTANCE,
                                                     child ? (unsigned)state->device[at].compute_instance : NO_INSTANCE};
        }
    }
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v1_t *infos) {
    BEGIN_DEVICE(handle);
    return processes_of(entry, count, infos, NULL);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v3_t *infos) {
    BEGIN_DEVICE(handle);
    return processes_of(entry, count, NULL, infos);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v3_t *infos) {
    BEGIN_DEVICE(handle);
    return processes_of(entry, count, NULL, infos);
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v3_t *infos) {
    (void)infos;
    BEGIN_DEVICE(handle);
    *count = 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v3_t *infos) {
    (void)infos;
    BEGIN_DEVICE(handle);
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *rates) {
    BEGIN_DEVICE(handle);
    int percent = __atomic_load_n(&device->utilization, __ATOMIC_ACQUIRE);
    if (percent < 0 || device->mig_enabled || device->parent >= 0) return NVML_ERROR_NOT_SUPPORTED;
    rates->gpu = (unsigned)percent;
    rates->memory = (unsigned)percent / 2;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, int sensor, unsigned *celsius) {
    (void)sensor;
    BEGIN_DEVICE(handle);
    *celsius = 42;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t handle, unsigned *milliwatts) {
    BEGIN_DEVICE(handle);
    *milliwatts = 300000;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t handle, int *mode) {
    BEGIN_DEVICE(handle);
    *mode = 1;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t handle, int *mode) {
    BEGIN_DEVICE(handle);
    *mode = 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t handle, int *major, int *minor) {
    BEGIN_DEVICE(handle);
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t handle, unsigned *architecture) {
    BEGIN_DEVICE(handle);
    *architecture = 9; /* Hopper */
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *current, unsigned *pending) {
    BEGIN_DEVICE(handle);
    if (device->parent >= 0) return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = (unsigned)device->mig_enabled;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned *count) {
    BEGIN_DEVICE(handle);
    *count = device->mig_enabled ? 7 : 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *mig) {
    BEGIN_DEVICE(handle);
    for (uint32_t i = state->physical; i < state->entries; i++)
        if (state->device[i].parent == entry && !state->device[i].gone &&
            state->device[i].gpu_instance == EMU_FIRST_GPU_INSTANCE + (int)index)
            return handle_of((int)i, mig);
    return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t handle, unsigned *is_mig) {
    BEGIN_DEVICE(handle);
    *is_mig = device->parent >= 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *parent) {
    BEGIN_DEVICE(mig);
    return device->parent >= 0 ? handle_of(device->parent, parent) : NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned *id) {
    BEGIN_DEVICE(handle);
    if (device->parent < 0) return NVML_ERROR_NOT_SUPPORTED;
    *id = (unsigned)device->gpu_instance;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, unsigned *id) {
    BEGIN_DEVICE(handle);
    if (device->parent < 0) return NVML_ERROR_NOT_SUPPORTED;
    *id = (unsigned)device->compute_instance;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t handle, nvmlDeviceAttributes_t *attributes) {
    BEGIN_DEVICE(handle);
    if (device->parent < 0) return NVML_ERROR_NOT_SUPPORTED;
    unsigned slices = 1;
    const char *profile = strstr(device->name, "MIG ");
    if (profile) sscanf(profile, "MIG %ug.", &slices);
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessorCount = 16 * slices;
    attributes->gpuInstanceSliceCount = attributes->computeInstanceSliceCount = slices;
    attributes->memorySizeMB = device->total >> 20;
    return NVML_SUCCESS;
}

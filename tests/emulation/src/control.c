/* libemunode.so: the control interface of the node for Python (ctypes). It creates the node, changes it while programs
 * run, and reads its accounts atomically. Functions return 0 or an errno unless stated otherwise. */
#define _GNU_SOURCE
#include "node.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

struct control_device { /* mirrored in node.py */
    uint64_t total, reserved;
    int64_t unattributed, shared, used;
    int32_t parent, gpu_instance, compute_instance, gone;
    char uuid[96], name[96];
};

API int emu_control_create(const char *path, uint32_t physical, uint32_t entries, const struct control_device *devices,
                           uint64_t context_bytes, int32_t cuda_version, const char *driver_version) {
    char lock_path[4096];
    if (!physical || physical > entries || entries > EMU_MAX_DEVICES) return EINVAL;
    snprintf(lock_path, sizeof lock_path, "%s.locks", path);
    int lock_file = open(lock_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (lock_file < 0) return errno;
    close(lock_file);
    snprintf(lock_path, sizeof lock_path, "%s.nvidiactl", path);
    int device_file = open(lock_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (device_file < 0) return errno;
    close(device_file);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return errno;
    struct emu_state *state = MAP_FAILED;
    if (!ftruncate(fd, sizeof *state)) state = mmap(0, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = errno;
    close(fd);
    if (state == MAP_FAILED) return error;

    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&state->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);

    state->layout = EMU_LAYOUT;
    state->physical = physical;
    state->entries = entries;
    state->context_bytes = context_bytes;
    state->cuda_version = cuda_version;
    snprintf(state->driver_version, sizeof state->driver_version, "%s", driver_version);
    for (uint32_t i = 0; i < entries; i++) {
        struct emu_device *device = &state->device[i];
        if (i < physical) state->order[i] = (int32_t)i;
        device->total = devices[i].total;
        device->reserved = devices[i].reserved;
        device->unattributed = devices[i].unattributed;
        device->shared = devices[i].shared;
        device->parent = devices[i].parent;
        device->gpu_instance = devices[i].gpu_instance;
        device->compute_instance = devices[i].compute_instance;
        if (device->parent >= 0) state->device[device->parent].mig_enabled = 1;
        memcpy(device->uuid, devices[i].uuid, sizeof device->uuid);
        memcpy(device->name, devices[i].name, sizeof device->name);
    }
    __atomic_store_n(&state->magic, EMU_MAGIC, __ATOMIC_RELEASE);
    munmap(state, sizeof *state);
    return 0;
}

API int emu_control_open(const char *path, struct emu_node **out) {
    struct emu_node *node = calloc(1, sizeof *node);
    if (!node) return ENOMEM;
    int error = emu_open(path, node);
    if (error) {
        free(node);
        return error;
    }
    *out = node;
    return 0;
}

API void emu_control_close(struct emu_node *node) {
    munmap(node->state, sizeof *node->state);
    close(node->lock_file);
    free(node);
}

/* Reads all devices and processes at one time. Returns the number of rows, which may exceed `room`. */
API int emu_control_books(struct emu_node *node, struct control_device *devices, int32_t *row_device, int32_t *row_pid,
                          uint64_t *row_used, int room) {
    struct emu_state *state = node->state;
    int rows = 0;
    static struct emu_use uses[EMU_MAX_PROCESSES];
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one);
    emu_lock(state);
    emu_reap(node);
    for (uint32_t i = 0; i < state->entries; i++) {
        struct emu_device *device = &state->device[i];
        devices[i] = (struct control_device){.total = device->total,
                                             .reserved = device->reserved,
                                             .unattributed = emu_unattributed(state, (int)i),
                                             .used = emu_used_locked(node, (int)i),
                                             .parent = device->parent,
                                             .gpu_instance = device->gpu_instance,
                                             .compute_instance = device->compute_instance,
                                             .gone = device->gone};
        memcpy(devices[i].uuid, device->uuid, sizeof device->uuid);
        memcpy(devices[i].name, device->name, sizeof device->name);
        int count = emu_uses_locked(node, (int)i, uses, EMU_MAX_PROCESSES);
        for (int k = 0; k < count; k++, rows++) {
            if (rows >= room) continue;
            row_device[rows] = (int32_t)i;
            row_pid[rows] = uses[k].pid;
            row_used[rows] = uses[k].used;
        }
    }
    emu_unlock(state);
    pthread_mutex_unlock(&one);
    return rows;
}

/* Adds an artificial process with this pid until it is removed; another call sets its bytes. */
API int emu_control_set_foreign(struct emu_node *node, int32_t pid, int device, uint64_t bytes) {
    struct emu_state *state = node->state;
    int error = 0, at = -1;
    if (device < 0 || (uint32_t)device >= state->entries || pid <= 0) return EINVAL;
    emu_lock(state);
    emu_reap(node);
    for (int slot = 0; slot < EMU_MAX_PROCESSES; slot++)
        if (state->process[slot].state == EMU_FOREIGN && state->process[slot].pid == pid) at = slot;
    for (int slot = 0; slot < EMU_MAX_PROCESSES && at < 0; slot++)
        if (state->process[slot].state == EMU_FREE) at = slot;
    uint64_t before = at < 0 ? 0 : state->used[device][at];
    if (at < 0) error = ENOSPC;
    else if (bytes > before && !emu_fits_locked(node, device, bytes - before)) error = ENOMEM;
    else {
        state->process[at].pid = pid;
        state->process[at].contexts |= 1ull << device;
        state->used[device][at] = bytes;
        if ((uint32_t)at >= state->processes) state->processes = (uint32_t)at + 1;
        __atomic_store_n(&state->process[at].state, EMU_FOREIGN, __ATOMIC_RELEASE);
    }
    emu_unlock(state);
    return error;
}

API int emu_control_remove_foreign(struct emu_node *node, int32_t pid) {
    struct emu_state *state = node->state;
    int error = ESRCH;
    emu_lock(state);
    for (uint32_t slot = 0; slot < state->processes; slot++)
        if (state->process[slot].state == EMU_FOREIGN && state->process[slot].pid == pid) {
            emu_forget_locked(node, (int)slot);
            error = 0;
        }
    emu_unlock(state);
    return error;
}

/* Sets the pid with which NVML lists a live process, given by its own pid; 0 restores the real pid. */
API int emu_control_show_as(struct emu_node *node, int32_t pid, int32_t shown) {
    struct emu_state *state = node->state;
    int error = ESRCH;
    emu_lock(state);
    for (uint32_t slot = 0; slot < state->processes; slot++)
        if (state->process[slot].state == EMU_LIVE && state->process[slot].pid == pid) {
            state->process[slot].shown_pid = shown;
            error = 0;
        }
    emu_unlock(state);
    return error;
}

/* A lost device (15) that is restored stays lost in the NVML sessions that were open before. */
API void emu_control_set_device_error(struct emu_node *node, int device, int32_t code) {
    emu_lock(node->state);
    if (code == 15) node->state->device[device].lost_generation = ++node->state->generation;
    __atomic_store_n(&node->state->device[device].nvml_error, code, __ATOMIC_RELEASE);
    emu_unlock(node->state);
}

API void emu_control_set_init_error(struct emu_node *node, int32_t code) {
    __atomic_store_n(&node->state->init_error, code, __ATOMIC_RELEASE);
}

API void emu_control_restart_driver(struct emu_node *node) {
    emu_lock(node->state);
    node->state->restart_generation = ++node->state->generation;
    emu_unlock(node->state);
}

/* Restarts the driver with another order of the physical devices: order[i] is the entry of NVML index i. */
API void emu_control_restart_reordered(struct emu_node *node, const int32_t *order) {
    emu_lock(node->state);
    memcpy(node->state->order, order, node->state->physical * sizeof *order);
    node->state->restart_generation = ++node->state->generation;
    emu_unlock(node->state);
}

/* Whether a process has a context on the device or on a MIG device of it. */
static int is_used(struct emu_node *node, int device) {
    struct emu_use use;
    for (uint32_t i = 0; i < node->state->entries; i++)
        if (((int)i == device || node->state->device[i].parent == device) && emu_uses_locked(node, (int)i, &use, 1))
            return 1;
    return 0;
}

static int slot_is_taken(struct emu_state *state, int parent, int slot) {
    for (uint32_t i = state->physical; i < state->entries; i++)
        if (state->device[i].parent == parent && !state->device[i].gone &&
            state->device[i].gpu_instance == EMU_FIRST_GPU_INSTANCE + slot)
            return 1;
    return 0;
}

/* Creates a MIG device in its GPU's first free slot. Returns its entry, or a negative errno. */
API int emu_control_create_mig(struct emu_node *node, const struct control_device *made) {
    struct emu_state *state = node->state;
    int entry = -EINVAL;
    emu_lock(state);
    if (state->entries == EMU_MAX_DEVICES) entry = -ENOSPC;
    else if (state->device[made->parent].mig_enabled) {
        entry = (int)state->entries;
        struct emu_device *device = &state->device[entry];
        memset(device, 0, sizeof *device);
        device->total = made->total;
        device->reserved = made->reserved;
        device->parent = made->parent;
        device->gpu_instance = EMU_FIRST_GPU_INSTANCE;
        while (slot_is_taken(state, made->parent, device->gpu_instance - EMU_FIRST_GPU_INSTANCE)) device->gpu_instance++;
        memcpy(device->uuid, made->uuid, sizeof device->uuid);
        memcpy(device->name, made->name, sizeof device->name);
        __atomic_store_n(&state->entries, state->entries + 1, __ATOMIC_RELEASE);
    }
    emu_unlock(state);
    return entry;
}

/* Destroys a MIG device; EBUSY if a process has a context on it. */
API int emu_control_destroy_mig(struct emu_node *node, int entry) {
    struct emu_state *state = node->state;
    int error = 0;
    emu_lock(state);
    emu_reap(node);
    if (state->device[entry].parent < 0 || state->device[entry].gone) error = EINVAL;
    else if (is_used(node, entry)) error = EBUSY;
    else state->device[entry].gone = 1;
    emu_unlock(state);
    return error;
}

API void emu_control_set_utilization(struct emu_node *node, int device, int32_t percent) {
    __atomic_store_n(&node->state->device[device].utilization, percent, __ATOMIC_RELEASE);
}

/* Returns the rule's number, or -1 if there is no room. Not thread-safe. */
API int emu_control_add_rule(struct emu_node *node, const char *function, int device, int32_t action, int32_t value) {
    struct emu_state *state = node->state;
    for (int i = 0; i < EMU_MAX_RULES; i++) {
        struct emu_rule *rule = &state->rule[i];
        if (rule->active || __atomic_load_n(&rule->waiting, __ATOMIC_ACQUIRE)) continue;
        snprintf(rule->function, sizeof rule->function, "%s", function);
        rule->device = device;
        rule->action = action;
        rule->value = value;
        __atomic_store_n(&rule->hits, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&rule->active, (int32_t)++state->generation, __ATOMIC_RELEASE);
        __atomic_add_fetch(&state->active_rules, 1, __ATOMIC_ACQ_REL);
        return i;
    }
    return -1;
}

API void emu_control_remove_rule(struct emu_node *node, int number) {
    if (__atomic_exchange_n(&node->state->rule[number].active, 0, __ATOMIC_ACQ_REL))
        __atomic_sub_fetch(&node->state->active_rules, 1, __ATOMIC_ACQ_REL);
}

API uint32_t emu_control_rule_hits(struct emu_node *node, int number) {
    return __atomic_load_n(&node->state->rule[number].hits, __ATOMIC_ACQUIRE);
}

API uint32_t emu_control_rule_waiting(struct emu_node *node, int number) {
    return __atomic_load_n(&node->state->rule[number].waiting, __ATOMIC_ACQUIRE);
}

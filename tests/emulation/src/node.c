/* See node.h. Compiled into each of the libraries. */
#define _GNU_SOURCE
#include "node.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LOCK_TIMEOUT_SECONDS = 60 };

int emu_open(const char *path, struct emu_node *node) {
    char lock_path[PATH_MAX];
    struct stat status;
    if (snprintf(lock_path, sizeof lock_path, "%s.locks", path) >= (int)sizeof lock_path) return ENAMETOOLONG;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return errno;
    if (fstat(fd, &status) || status.st_size != (off_t)sizeof(struct emu_state)) {
        close(fd);
        return EPROTO;
    }
    struct emu_state *state = mmap(0, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = errno;
    close(fd);
    if (state == MAP_FAILED) return error;
    if (state->magic != EMU_MAGIC || state->layout != EMU_LAYOUT) {
        munmap(state, sizeof *state);
        return EPROTO;
    }
    fd = open(lock_path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        error = errno;
        munmap(state, sizeof *state);
        return error;
    }
    node->state = state;
    node->lock_file = fd;
    return 0;
}

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static struct emu_node the_node;

static void open_the_node(void) {
    const char *path = getenv("EMULATED_NODE");
    if (!path) {
        fprintf(stderr, "emulated node: EMULATED_NODE is not set: no device\n");
        return;
    }
    int error = emu_open(path, &the_node);
    if (error) fprintf(stderr, "emulated node: %s: %s\n", path, strerror(error));
}

struct emu_node *emu_node(void) {
    pthread_once(&opened, open_the_node);
    return the_node.state ? &the_node : NULL;
}

void emu_lock(struct emu_state *state) {
    int result = pthread_mutex_trylock(&state->mutex);
    if (result == EBUSY) {
        struct timespec end;
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec += LOCK_TIMEOUT_SECONDS;
        result = pthread_mutex_timedlock(&state->mutex, &end);
    }
    if (result == EOWNERDEAD) result = pthread_mutex_consistent(&state->mutex);
    if (!result) return;
    fprintf(stderr, "emulated node: its lock could not be had in %d s: %s\n", LOCK_TIMEOUT_SECONDS, strerror(result));
    abort();
}

void emu_unlock(struct emu_state *state) { pthread_mutex_unlock(&state->mutex); }

/* F_GETLK does not report a process' own record lock, so its own slot is stored separately. */
static int own_slot(void) {
    static int (*ask)(void);
    static int looked;
    if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) {
        ask = (int (*)(void))dlsym(RTLD_DEFAULT, "emu_own_slot");
        __atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
    }
    return ask ? ask() : -1;
}

/* The pid, in this PID namespace, of the process in a slot; 0 if it has ended, -1 if this namespace does not see it. */
static int32_t holder(struct emu_node *node, int slot, int own) {
    struct emu_process *process = &node->state->process[slot];
    if (process->state == EMU_FOREIGN) return process->pid;
    if (slot == own) return process->shown_pid ? process->shown_pid : getpid();
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    if (fcntl(node->lock_file, F_GETLK, &lock) || lock.l_type == F_UNLCK) return 0;
    if (process->shown_pid) return process->shown_pid;
    return lock.l_pid > 0 ? lock.l_pid : -1;
}

static void forget(struct emu_state *state, int slot) {
    for (uint32_t device = 0; device < state->entries; device++) state->used[device][slot] = 0;
    state->process[slot].contexts = 0;
    state->process[slot].shown_pid = 0;
    __atomic_store_n(&state->process[slot].state, EMU_FREE, __ATOMIC_RELEASE);
}

/* Frees the slots of processes that have ended. The caller holds the mutex. */
static void reap_but(struct emu_node *node, int own) {
    struct emu_state *state = node->state;
    for (uint32_t slot = 0; slot < state->processes; slot++)
        if (state->process[slot].state == EMU_LIVE && !holder(node, slot, own)) forget(state, slot);
    while (state->processes && state->process[state->processes - 1].state == EMU_FREE) state->processes--;
}

int64_t emu_unattributed(const struct emu_state *state, int device) {
    int64_t sum = state->device[device].unattributed;
    for (uint32_t slot = 0; slot < state->processes; slot++)
        if (state->used[device][slot]) return sum + state->device[device].shared;
    return sum;
}

static int64_t sum_used(struct emu_state *state, int device) {
    int64_t sum = emu_unattributed(state, device);
    for (uint32_t slot = 0; slot < state->processes; slot++) sum += (int64_t)state->used[device][slot];
    if (state->device[device].mig_enabled)
        for (uint32_t entry = state->physical; entry < state->entries; entry++)
            if (state->device[entry].parent == device) sum += sum_used(state, (int)entry);
    return sum;
}

static int64_t limit(struct emu_state *state, int device) {
    return (int64_t)(state->device[device].total - state->device[device].reserved);
}

void emu_reap(struct emu_node *node) { reap_but(node, own_slot()); }

void emu_forget_locked(struct emu_node *node, int slot) { forget(node->state, slot); }

int64_t emu_used_locked(struct emu_node *node, int device) { return sum_used(node->state, device); }

int emu_fits_locked(struct emu_node *node, int device, uint64_t bytes) {
    if (bytes > (uint64_t)INT64_MAX / 4) return 0;
    if (sum_used(node->state, device) + (int64_t)bytes <= limit(node->state, device)) return 1;
    emu_reap(node); /* release the memory of ended processes */
    return sum_used(node->state, device) + (int64_t)bytes <= limit(node->state, device);
}

int emu_claim(struct emu_node *node) {
    struct emu_state *state = node->state;
    int claimed = -1;
    emu_lock(state);
    reap_but(node, -1);
    for (int slot = 0; slot < EMU_MAX_PROCESSES && claimed < 0; slot++) {
        if (state->process[slot].state != EMU_FREE) continue;
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
        if (fcntl(node->lock_file, F_SETLK, &lock)) continue;
        forget(state, slot);
        state->process[slot].pid = getpid();
        if ((uint32_t)slot >= state->processes) state->processes = (uint32_t)slot + 1;
        __atomic_store_n(&state->process[slot].state, EMU_LIVE, __ATOMIC_RELEASE);
        claimed = slot;
    }
    emu_unlock(state);
    if (claimed < 0) fprintf(stderr, "emulated node: no room for another process (%d)\n", EMU_MAX_PROCESSES);
    return claimed;
}

int emu_create_context(struct emu_node *node, int slot, int device) {
    struct emu_state *state = node->state;
    int done = 1;
    emu_lock(state);
    if (!(state->process[slot].contexts >> device & 1)) {
        done = emu_fits_locked(node, device, state->context_bytes);
        if (done) {
            state->used[device][slot] += state->context_bytes;
            state->process[slot].contexts |= 1ull << device;
        }
    }
    emu_unlock(state);
    return done;
}

int emu_take(struct emu_node *node, int slot, int device, uint64_t bytes) {
    emu_lock(node->state);
    int done = emu_fits_locked(node, device, bytes);
    if (done) node->state->used[device][slot] += bytes;
    emu_unlock(node->state);
    return done;
}

void emu_give(struct emu_node *node, int slot, int device, uint64_t bytes) {
    emu_lock(node->state);
    node->state->used[device][slot] -= bytes;
    emu_unlock(node->state);
}

void emu_reset(struct emu_node *node, int slot, int device) {
    emu_lock(node->state);
    node->state->process[slot].contexts &= ~(1ull << device);
    node->state->used[device][slot] = 0;
    emu_unlock(node->state);
}

int64_t emu_used(struct emu_node *node, int device) {
    emu_lock(node->state);
    emu_reap(node);
    int64_t used = sum_used(node->state, device);
    emu_unlock(node->state);
    return used;
}

int emu_uses_locked(struct emu_node *node, int device, struct emu_use *uses, int room) {
    struct emu_state *state = node->state;
    int count = 0, own = own_slot();
    for (uint32_t slot = 0; slot < state->processes; slot++) {
        if (state->process[slot].state == EMU_FREE || !(state->process[slot].contexts >> device & 1)) continue;
        int32_t pid = holder(node, (int)slot, own);
        if (pid <= 0) continue;
        if (count < room) uses[count] = (struct emu_use){pid, (int32_t)slot, state->used[device][slot]};
        count++;
    }
    return count;
}

int emu_uses(struct emu_node *node, int device, struct emu_use *uses, int room) {
    emu_lock(node->state);
    int count = emu_uses_locked(node, device, uses, room);
    emu_unlock(node->state);
    return count;
}

static void pause_ms(int32_t milliseconds) {
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    while (nanosleep(&left, &left) && errno == EINTR) {
    }
}

int emu_gate(struct emu_node *node, const char *function, int device) {
    struct emu_state *state = node->state;
    if (!__atomic_load_n(&state->active_rules, __ATOMIC_ACQUIRE)) return 0;
    int error = 0;
    for (int i = 0; i < EMU_MAX_RULES; i++) {
        struct emu_rule *rule = &state->rule[i];
        if (!__atomic_load_n(&rule->active, __ATOMIC_ACQUIRE)) continue;
        if (rule->device != EMU_ANY_DEVICE && rule->device != device) continue;
        if (fnmatch(rule->function, function, 0)) continue;
        __atomic_add_fetch(&rule->hits, 1, __ATOMIC_ACQ_REL);
        if (rule->action == EMU_RULE_DELAY) pause_ms(rule->value);
        if (rule->action == EMU_RULE_HANG) {
            int32_t round = __atomic_load_n(&rule->active, __ATOMIC_ACQUIRE);
            __atomic_add_fetch(&rule->waiting, 1, __ATOMIC_ACQ_REL);
            while (round && __atomic_load_n(&rule->active, __ATOMIC_ACQUIRE) == round) pause_ms(1);
            __atomic_sub_fetch(&rule->waiting, 1, __ATOMIC_ACQ_REL);
        }
        if (rule->action == EMU_RULE_ERROR && !error) error = rule->value;
    }
    return error;
}

void emu_uuid_bytes(const char *uuid, char *bytes) {
    int high = -1, n = 0;
    for (const char *c = uuid + 4; *c && n < 16; c++) {
        int digit = *c >= '0' && *c <= '9' ? *c - '0' : *c >= 'a' && *c <= 'f' ? *c - 'a' + 10 : -1;
        if (digit < 0) continue;
        if (high < 0) high = digit;
        else {
            bytes[n++] = (char)(high << 4 | digit);
            high = -1;
        }
    }
}

void emu_unmet(const char *name, int *said) {
    if (!__atomic_exchange_n(said, 1, __ATOMIC_ACQ_REL)) fprintf(stderr, "emulated node: %s is not emulated\n", name);
}

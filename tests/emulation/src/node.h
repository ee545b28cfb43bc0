/* The emulated node: one file, mapped shared by every process on the node, and the accounting of its bytes.
 *
 * The kernel knows whether a process lives. Each process has a POSIX record lock on its own byte of the lock file next
 * to the state file. The kernel releases the lock when the process ends for any reason. A later process with the same
 * pid does not have it, a forked child does not inherit it, and F_GETLK returns the holder's pid in the caller's PID
 * namespace. POSIX releases a process' locks when it closes ANY descriptor of that file, so each library opens the lock
 * file once and never closes it.
 *
 * Every byte count is written in one step under one robust mutex, and the use of a device is the sum over the live
 * processes. A process that is killed at any instruction therefore leaves a consistent state.
 */
#ifndef EMULATED_NODE_H
#define EMULATED_NODE_H
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EMU_MAGIC 0x454d554e4f444531ull
#define EMU_LAYOUT 3u
enum { EMU_MAX_DEVICES = 64, EMU_MAX_PROCESSES = 1024, EMU_MAX_RULES = 32, EMU_ANY_DEVICE = -1 };
enum { EMU_FIRST_GPU_INSTANCE = 7 }; /* a MIG device's slot is its GPU instance's number less this */
enum emu_process_state { EMU_FREE = 0, EMU_LIVE = 1, EMU_FOREIGN = 2 };
enum emu_rule_action { EMU_RULE_ERROR = 1, EMU_RULE_DELAY = 2, EMU_RULE_HANG = 3 };

struct emu_device {
    uint64_t total, reserved;
    int64_t unattributed; /* used bytes of no process; may be negative */
    int64_t shared;       /* further used bytes of no process while any process uses the device */
    int32_t parent;       /* entry of the physical device, -1 for a physical device itself */
    int32_t gpu_instance, compute_instance;
    int32_t mig_enabled;
    int32_t nvml_error;        /* the result of every NVML call on the device; 0 for none */
    uint32_t lost_generation;  /* NVML sessions opened before this generation keep seeing a lost device as lost */
    int32_t utilization;       /* percent, -1: not supported */
    int32_t gone;              /* a MIG device that was destroyed; entries are not reused */
    char uuid[96], name[96];
};

struct emu_process {
    int32_t state, pid; /* pid: in the process' own PID namespace */
    int32_t shown_pid;  /* the pid in NVML; 0: that of the lock's holder by the kernel */
    int32_t spare;
    uint64_t contexts; /* bit per device entry: has a primary context there */
};

/* A rule that applies to calls whose name matches the pattern (fnmatch), before they do anything. */
struct emu_rule {
    int32_t active, action, value, device; /* value: an error code, or milliseconds */
    uint32_t hits, waiting;                /* matched calls; calls that hang now */
    char function[80];
};

struct emu_state {
    uint64_t magic;
    uint32_t layout, physical, entries, processes; /* processes: one past the highest slot ever used */
    uint32_t generation;                           /* counts driver restarts and lost devices */
    uint32_t restart_generation;                   /* NVML sessions opened before it are invalid */
    int32_t init_error, active_rules;
    uint64_t context_bytes;
    int32_t cuda_version;
    char driver_version[44];
    pthread_mutex_t mutex;
    int32_t order[EMU_MAX_DEVICES]; /* entry of each NVML index */
    struct emu_device device[EMU_MAX_DEVICES];
    struct emu_process process[EMU_MAX_PROCESSES];
    struct emu_rule rule[EMU_MAX_RULES];
    uint64_t used[EMU_MAX_DEVICES][EMU_MAX_PROCESSES]; /* bytes, including the context */
};

struct emu_node {
    struct emu_state *state;
    int lock_file;
};

struct emu_use {
    int32_t pid, slot;
    uint64_t used;
};

/* The node at $EMULATED_NODE, mapped once in this process; NULL if there is none, which is printed once. */
struct emu_node *emu_node(void);
/* Maps the node at `path`; 0, or an errno. */
int emu_open(const char *path, struct emu_node *node);

/* The mutex of the node's accounts, which is robust against the death of its owner. */
void emu_lock(struct emu_state *state);
void emu_unlock(struct emu_state *state);

/* The slot of this process in the preloaded runtime; -1 if it has none or is a forked child of the slot's process. */
int emu_own_slot(void);

/* Claims a slot for this process and locks its byte. Returns the slot, or -1 when the table is full. */
int emu_claim(struct emu_node *node);
/* Creates the primary context of `slot` on `device` and counts its bytes. Returns 1, or 0 if out of memory. */
int emu_create_context(struct emu_node *node, int slot, int device);
/* Allocates `bytes` of the device for `slot` atomically. Returns 1, or 0 if out of memory. */
int emu_take(struct emu_node *node, int slot, int device, uint64_t bytes);
void emu_give(struct emu_node *node, int slot, int device, uint64_t bytes);
/* Frees all memory of `slot` on the device, including its context. */
void emu_reset(struct emu_node *node, int slot, int device);

/* Used bytes of no process. The caller holds the mutex. */
int64_t emu_unattributed(const struct emu_state *state, int device);

/* Bytes used on a device by live processes, including those on its MIG devices, plus the unattributed bytes. */
int64_t emu_used(struct emu_node *node, int device);
/* Writes at most `room` live processes with a context on the device; returns the number of all of them. */
int emu_uses(struct emu_node *node, int device, struct emu_use *uses, int room);

/* The same functions and their parts for a caller that holds the mutex. */
void emu_reap(struct emu_node *node);
void emu_forget_locked(struct emu_node *node, int slot);
int emu_fits_locked(struct emu_node *node, int device, uint64_t bytes);
int64_t emu_used_locked(struct emu_node *node, int device);
int emu_uses_locked(struct emu_node *node, int device, struct emu_use *uses, int room);

/* Applies the rules that match a call: delays it or hangs it until release, and returns its error code or 0. */
int emu_gate(struct emu_node *node, const char *function, int device);

/* Writes the 16 bytes of a UUID such as GPU-… or MIG-…. */
void emu_uuid_bytes(const char *uuid, char *bytes);

/* Prints to stderr, once for each name, that a call is not emulated. */
void emu_unmet(const char *name, int *said);
#endif

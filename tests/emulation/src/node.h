/* The emulated node: one file, mapped shared by every process that runs on it, and how its bytes are taken and given.
 *
 * Whether a process lives is asked of the kernel, not recorded: each process holds a POSIX record lock on its own byte
 * of the lock file next to the state file. The kernel drops it when the process ends, however it ends; a later process
 * with the same pid does not hold it; a forked child does not inherit it; and F_GETLK names the holder as the asker's
 * PID namespace knows it. POSIX drops a process' locks when it closes ANY descriptor of that file, so the lock file is
 * opened once by each library and never closed.
 *
 * Every byte count has one writer step under one robust mutex, and a device's use is the sum over the processes that
 * live: a process killed at any instruction leaves no half-made state behind.
 */
#ifndef EMULATED_NODE_H
#define EMULATED_NODE_H
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EMU_MAGIC 0x454d554e4f444531ull
#define EMU_LAYOUT 2u
enum { EMU_MAX_DEVICES = 64, EMU_MAX_PROCESSES = 1024, EMU_MAX_RULES = 32, EMU_ANY_DEVICE = -1 };
enum { EMU_FIRST_GPU_INSTANCE = 7 }; /* a MIG device's slot is its GPU instance's number less this */
enum emu_process_state { EMU_FREE = 0, EMU_LIVE = 1, EMU_FOREIGN = 2 };
enum emu_rule_action { EMU_RULE_ERROR = 1, EMU_RULE_DELAY = 2, EMU_RULE_HANG = 3 };

struct emu_device {
    uint64_t total, reserved;
    int64_t unattributed; /* used that no process owns; may be negative */
    int32_t parent;       /* entry of the physical device, -1 for a physical device itself */
    int32_t gpu_instance, compute_instance;
    int32_t mig_enabled;
    int32_t nvml_error;        /* every NVML call on the device answers this, 0 is none */
    uint32_t lost_generation;  /* NVML sessions opened before this generation keep seeing a lost device as lost */
    int32_t utilization;       /* percent, -1: not supported */
    int32_t processes_hidden;  /* per-process memory is "not available", as under WDDM */
    int32_t memory_hidden;     /* every figure of the device's memory is "not available" */
    int32_t gone;              /* a MIG device that was destroyed: no entry is used twice */
    char uuid[96], name[96];
};

struct emu_process {
    int32_t state, pid; /* pid: in the process' own PID namespace */
    int32_t shown_pid;  /* what NVML calls it, 0: as the kernel names the lock's holder */
    int32_t spare;
    uint64_t contexts; /* bit per device entry: has a primary context there */
};

/* What happens to calls whose name matches the pattern (fnmatch), before they do anything. */
struct emu_rule {
    int32_t active, action, value, device; /* value: an error code, or milliseconds */
    uint32_t hits, waiting;                /* calls met; calls that hang in it now */
    char function[80];
};

struct emu_state {
    uint64_t magic;
    uint32_t layout, physical, entries, processes; /* processes: one past the highest slot ever used */
    uint32_t generation;                           /* counts driver restarts and lost devices */
    uint32_t restart_generation;                   /* NVML sessions opened before it are void */
    int32_t init_error, active_rules;
    uint64_t context_bytes;
    int32_t cuda_version;
    char driver_version[44];
    pthread_mutex_t mutex;
    int32_t order[EMU_MAX_DEVICES]; /* entry of each NVML index */
    struct emu_device device[EMU_MAX_DEVICES];
    struct emu_process process[EMU_MAX_PROCESSES];
    struct emu_rule rule[EMU_MAX_RULES];
    uint64_t used[EMU_MAX_DEVICES][EMU_MAX_PROCESSES]; /* bytes, the context's included */
};

struct emu_node {
    struct emu_state *state;
    int lock_file;
};

struct emu_use {
    int32_t pid, slot;
    uint64_t used;
};

/* The node named by $EMULATED_NODE, mapped once in this process; NULL (said once on stderr) when there is none. */
struct emu_node *emu_node(void);
/* Maps the node at `path`; 0, or an errno. */
int emu_open(const char *path, struct emu_node *node);

/* The one mutex of the node's books; its owner's death passes it on. */
void emu_lock(struct emu_state *state);
void emu_unlock(struct emu_state *state);

/* This process' slot, -1 while it has none or is the forked child of the one that had it. Of the preloaded runtime. */
int emu_own_slot(void);

/* Claims a slot for this process and locks its byte. Returns the slot, or -1 when the table is full. */
int emu_claim(struct emu_node *node);
/* Creates the primary context of `slot` on `device`, taking its bytes. 1 done, 0 out of memory. */
int emu_create_context(struct emu_node *node, int slot, int device);
/* Takes `bytes` of the device for `slot` (all or nothing, whoever else asks at the same time): 1 done, 0 out of memory. */
int emu_take(struct emu_node *node, int slot, int device, uint64_t bytes);
void emu_give(struct emu_node *node, int slot, int device, uint64_t bytes);
/* Drops all that `slot` holds on the device, its context included. */
void emu_reset(struct emu_node *node, int slot, int device);

/* Bytes used on a device by live processes (a physical device: its MIG devices' too) and by nobody. */
int64_t emu_used(struct emu_node *node, int device);
/* The live processes with a context on the device, at most `room` of them written; returns how many there are. */
int emu_uses(struct emu_node *node, int device, struct emu_use *uses, int room);

/* The same and their parts, under a mutex that the caller holds. */
void emu_reap(struct emu_node *node);
void emu_forget_locked(struct emu_node *node, int slot);
int emu_fits_locked(struct emu_node *node, int device, uint64_t bytes);
int64_t emu_used_locked(struct emu_node *node, int device);
int emu_uses_locked(struct emu_node *node, int device, struct emu_use *uses, int room);

/* Applies the rules that match a call: delays it, hangs it until released, and returns the error it must answer or 0. */
int emu_gate(struct emu_node *node, const char *function, int device);

/* Says once for each name on stderr that a call is not emulated. */
void emu_unmet(const char *name, int *said);
#endif

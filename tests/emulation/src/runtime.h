/* Internal interface of the emulated CUDA runtime (LD_PRELOAD). */
#ifndef EMULATED_RUNTIME_H
#define EMULATED_RUNTIME_H
#include "node.h"
#include <cuda_runtime_api.h>

#define HIDDEN __attribute__((visibility("hidden")))
enum { EMU_PAGE = 2 << 20 }; /* the driver hands out device memory in 2 MiB pages */

/* Stores an error for cudaGetLastError in this thread, and returns it. */
HIDDEN cudaError_t rt_fail(cudaError_t error);
/* Starts a call that needs no context: initializes on first use, fails in a forked child, applies the node's rules. */
HIDDEN cudaError_t rt_enter(const char *function);
/* The same, and creates the primary context of the thread's current device. */
HIDDEN cudaError_t rt_enter_context(const char *function);
/* Creates the primary context of a visible device. */
HIDDEN cudaError_t rt_create_context(int device);
/* The thread's current device by the index of the process, and the entry of a visible device in the node. */
HIDDEN int rt_current(void);
HIDDEN int rt_entry(int device);
HIDDEN int rt_device_count(void);
HIDDEN int rt_slot(void);
HIDDEN int rt_has_context(int device);
/* Fails for a call that is not allowed during a stream capture, and invalidates that capture, as the runtime does. */
HIDDEN cudaError_t rt_unsafe(void);
/* Allocates whole pages of a visible device; returns their size, or 0 if the device is full. */
HIDDEN size_t rt_take(int device, size_t bytes);
HIDDEN void rt_give(int device, size_t pages);
/* Records work on a stream: a node of the graph if the stream captures. */
HIDDEN cudaError_t rt_submit(cudaStream_t stream);
/* Removes every allocation of a device (cudaDeviceReset). */
HIDDEN void rt_forget_allocations(int device);

#define ENTER(function)                                        \
    do {                                                       \
        cudaError_t entered_ = rt_enter(function);             \
        if (entered_ != cudaSuccess) return rt_fail(entered_); \
    } while (0)
#define ENTER_CONTEXT(function)                                \
    do {                                                       \
        cudaError_t entered_ = rt_enter_context(function);     \
        if (entered_ != cudaSuccess) return rt_fail(entered_); \
    } while (0)
#define SAFE_OR_FAIL()                                         \
    do {                                                       \
        cudaError_t refused_ = rt_unsafe();                    \
        if (refused_ != cudaSuccess) return rt_fail(refused_); \
    } while (0)
#endif

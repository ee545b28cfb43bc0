/* The CUDA runtime's stand-in (LD_PRELOAD), inside: what its files share. */
#ifndef EMULATED_RUNTIME_H
#define EMULATED_RUNTIME_H
#include "node.h"
#include <cuda_runtime_api.h>

#define HIDDEN __attribute__((visibility("hidden")))
enum { EMU_PAGE = 2 << 20 }; /* the driver hands out device memory in 2 MiB pages */

/* Remembers an error for cudaGetLastError, as the runtime does for each thread; returns it. */
HIDDEN cudaError_t rt_fail(cudaError_t error);
/* Begins a call that needs no context: initializes on first use, refuses a forked child, applies the node's rules. */
HIDDEN cudaError_t rt_enter(const char *function);
/* The same, and creates the primary context of the thread's current device. */
HIDDEN cudaError_t rt_enter_context(const char *function);
/* Creates the primary context of a visible device. */
HIDDEN cudaError_t rt_create_context(int device);
/* The thread's current device, as the process numbers devices, and a visible device's entry in the node. */
HIDDEN int rt_current(void);
HIDDEN int rt_entry(int device);
HIDDEN int rt_device_count(void);
HIDDEN int rt_slot(void);
HIDDEN int rt_has_context(int device);
/* Refuses a call that is not allowed while a stream capture is under way, and spoils that capture, as the runtime does. */
HIDDEN cudaError_t rt_unsafe(void);
/* Takes whole pages of a visible device: their size, or 0 when the device is full. */
HIDDEN size_t rt_take(int device, size_t bytes);
HIDDEN void rt_give(int device, size_t pages);
/* Notes a piece of work on a stream: a node of the graph when the stream captures. */
HIDDEN cudaError_t rt_submit(cudaStream_t stream);
/* Forgets every allocation of a device (cudaDeviceReset). */
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

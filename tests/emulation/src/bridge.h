/* Calls from the emulated driver to the preloaded runtime, so that both use the contexts of the process. Devices have
 * the indexes of the process; the results are CUDA error codes, whose numbers are the same in both libraries. */
#ifndef EMULATED_BRIDGE_H
#define EMULATED_BRIDGE_H
#include <stddef.h>

struct emu_bridge {
    int (*enter)(const char *function);
    int (*create_context)(int device);
    int (*has_context)(int device);
    int (*count)(void);
    int (*current)(void);
    int (*entry)(int device);
    size_t (*take)(int device, size_t bytes);
    void (*give)(int device, size_t pages);
};
#endif

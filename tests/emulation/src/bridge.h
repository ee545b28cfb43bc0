/* From the preloaded runtime to the driver's stand-in: one process has one set of contexts, whoever asks. Devices are
 * numbered as the process sees them; the results are CUDA error codes, which the two libraries share by number here. */
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

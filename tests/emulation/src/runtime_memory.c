/* Device memory, pinned host memory, the stream-ordered pool, and copies. Device memory is address space without pages
 * until data is copied to it, so that a large node fits on a small machine. */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct range {
    uintptr_t start;
    size_t bytes; /* as requested */
    size_t pages; /* allocated from the device; 0 if not */
    int device;   /* -1: host memory */
    int pooled;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges; /* sorted by start */
static size_t range_count, range_room;

/* The number of ranges that start at or before an address. */
static size_t position(uintptr_t address) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int remember(struct range range) {
    if (range_count == range_room) {
        size_t room = range_room ? range_room * 2 : 256;
        struct range *grown = realloc(ranges, room * sizeof *grown);
        if (!grown) return 0;
        ranges = grown;
        range_room = room;
    }
    size_t at = position(range.start);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = range;
    range_count++;
    return 1;
}

static struct range *starting_at(const void *pointer) {
    size_t at = position((uintptr_t)pointer);
    return at && ranges[at - 1].start == (uintptr_t)pointer ? &ranges[at - 1] : NULL;
}

static struct range *holding(const void *pointer) {
    size_t at = position((uintptr_t)pointer);
    if (!at) return NULL;
    struct range *range = &ranges[at - 1];
    return (uintptr_t)pointer - range->start < (range->bytes ? range->bytes : 1) ? range : NULL;
}

static void drop(struct range *range) {
    size_t at = (size_t)(range - ranges);
    memmove(range, range + 1, (range_count - at - 1) * sizeof *ranges);
    range_count--;
}

/* Address space for device memory, with the driver's alignment of 2 MiB. */
static void *reserve_space(size_t bytes) {
    size_t room = bytes + EMU_PAGE;
    char *space = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return NULL;
    char *aligned = (char *)(((uintptr_t)space + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE);
    if (aligned > space) munmap(space, (size_t)(aligned - space));
    if (space + room > aligned + bytes) munmap(aligned + bytes, (size_t)(space + room - (aligned + bytes)));
    return aligned;
}

static size_t rounded(size_t bytes) { return (bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE; }

static cudaError_t allocate(void **pointer, size_t bytes) {
    *pointer = NULL;
    if (!bytes) return cudaSuccess;
    int device = rt_current();
    size_t pages = rt_take(device, bytes);
    if (!pages) return rt_fail(cudaErrorMemoryAllocation);
    void *space = reserve_space(pages);
    pthread_mutex_lock(&mutex);
    int kept = space && remember((struct range){(uintptr_t)space, bytes, pages, device, 0});
    pthread_mutex_unlock(&mutex);
    if (!kept) {
        if (space) munmap(space, pages);
        rt_give(device, pages);
        return rt_fail(cudaErrorMemoryAllocation);
    }
    *pointer = space;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    ENTER_CONTEXT("cudaMalloc");
    SAFE_OR_FAIL();
    return allocate(pointer, bytes);
}

cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaMallocManaged");
    SAFE_OR_FAIL();
    return allocate(pointer, bytes);
}

/* The stream-ordered pool of each device: freed memory stays with the pool until it is trimmed. */
static struct pool {
    size_t used, used_high, reserved, reserved_high;
    uint64_t threshold;
} pools[EMU_MAX_DEVICES];

cudaError_t cudaFree(void *pointer) {
    ENTER_CONTEXT("cudaFree");
    if (!pointer) return cudaSuccess;
    SAFE_OR_FAIL();
    pthread_mutex_lock(&mutex);
    struct range *range = starting_at(pointer), found = range ? *range : (struct range){0};
    int known = range && found.device >= 0;
    if (known) {
        drop(range);
        munmap(pointer, rounded(found.bytes));
        if (found.pooled) pools[found.device].used -= rounded(found.bytes);
    }
    pthread_mutex_unlock(&mutex);
    if (!known) return rt_fail(cudaErrorInvalidValue);
    if (found.pages) rt_give(found.device, found.pages);
    return cudaSuccess;
}

void rt_forget_allocations(int device) {
    pthread_mutex_lock(&mutex);
    for (size_t i = range_count; i-- > 0;)
        if (ranges[i].device == device) {
            munmap((void *)ranges[i].start, rounded(ranges[i].bytes));
            drop(&ranges[i]);
        }
    memset(&pools[device], 0, sizeof pools[device]);
    pthread_mutex_unlock(&mutex);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    ENTER("cudaDeviceGetDefaultMemPool");
    if (device < 0 || device >= rt_device_count()) return rt_fail(cudaErrorInvalidDevice);
    *pool = (cudaMemPool_t)&pools[device];
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    ENTER_CONTEXT("cudaMallocAsync");
    int device = rt_current(), done = 1;
    *pointer = NULL;
    if (!bytes) return cudaSuccess;
    if (bytes > SIZE_MAX / 2) return rt_fail(cudaErrorMemoryAllocation);
    struct pool *pool = &pools[device];
    pthread_mutex_lock(&mutex);
    size_t pages = rounded(bytes);
    if (pool->used + pages > pool->reserved) {
        size_t more = pool->used + pages - pool->reserved;
        done = rt_take(device, more) == more;
        if (done) pool->reserved += more;
    }
    void *space = done ? reserve_space(pages) : NULL;
    if (space && remember((struct range){(uintptr_t)space, bytes, 0, device, 1})) {
        pool->used += pages;
        *pointer = space;
    }
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    pthread_mutex_unlock(&mutex);
    return *pointer ? rt_submit(stream) : rt_fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    ENTER_CONTEXT("cudaFreeAsync");
    pthread_mutex_lock(&mutex);
    struct range *range = starting_at(pointer);
    int pooled = range && range->pooled;
    if (pooled) {
        munmap(pointer, rounded(range->bytes));
        pools[range->device].used -= rounded(range->bytes);
        drop(range);
    }
    pthread_mutex_unlock(&mutex);
    return pooled ? rt_submit(stream) : rt_fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t keep) {
    ENTER_CONTEXT("cudaMemPoolTrimTo");
    struct pool *pool = (struct pool *)handle;
    pthread_mutex_lock(&mutex);
    size_t least = rounded(keep > pool->used ? keep : pool->used);
    size_t excess = pool->reserved > least ? pool->reserved - least : 0;
    pool->reserved -= excess;
    pthread_mutex_unlock(&mutex);
    if (excess) rt_give((int)(pool - pools), excess);
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    ENTER("cudaMemPoolGetAttribute");
    struct pool *pool = (struct pool *)handle;
    pthread_mutex_lock(&mutex);
    switch ((int)attribute) {
        case cudaMemPoolAttrReleaseThreshold: *(uint64_t *)value = pool->threshold; break;
        case cudaMemPoolAttrReservedMemCurrent: *(uint64_t *)value = pool->reserved; break;
        case cudaMemPoolAttrReservedMemHigh: *(uint64_t *)value = pool->reserved_high; break;
        case cudaMemPoolAttrUsedMemCurrent: *(uint64_t *)value = pool->used; break;
        case cudaMemPoolAttrUsedMemHigh: *(uint64_t *)value = pool->used_high; break;
        default: *(int *)value = 1;
    }
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    ENTER("cudaMemPoolSetAttribute");
    struct pool *pool = (struct pool *)handle;
    pthread_mutex_lock(&mutex);
    if (attribute == cudaMemPoolAttrReleaseThreshold) pool->threshold = *(uint64_t *)value;
    if (attribute == cudaMemPoolAttrReservedMemHigh) pool->reserved_high = pool->reserved;
    if (attribute == cudaMemPoolAttrUsedMemHigh) pool->used_high = pool->used;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

static cudaError_t host_allocate(void **pointer, size_t bytes) {
    size_t room = (bytes + 4095) / 4096 * 4096;
    void *space = mmap(0, room ? room : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (space == MAP_FAILED) return rt_fail(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&mutex);
    int kept = remember((struct range){(uintptr_t)space, bytes, 0, -1, 1});
    pthread_mutex_unlock(&mutex);
    if (!kept) return rt_fail(cudaErrorMemoryAllocation);
    *pointer = space;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaHostAlloc");
    SAFE_OR_FAIL();
    return host_allocate(pointer, bytes);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    ENTER_CONTEXT("cudaMallocHost");
    SAFE_OR_FAIL();
    return host_allocate(pointer, bytes);
}

static cudaError_t host_release(void *pointer, int pooled) {
    pthread_mutex_lock(&mutex);
    struct range *range = starting_at(pointer);
    int known = range && range->device < 0 && range->pooled == pooled;
    if (known) {
        if (pooled) munmap(pointer, range->bytes ? (range->bytes + 4095) / 4096 * 4096 : 4096);
        drop(range);
    }
    pthread_mutex_unlock(&mutex);
    return known ? cudaSuccess : rt_fail(cudaErrorInvalidValue);
}

cudaError_t cudaFreeHost(void *pointer) {
    ENTER("cudaFreeHost");
    if (!pointer) return cudaSuccess;
    SAFE_OR_FAIL();
    return host_release(pointer, 1);
}

/* Registered host memory of the caller, which must not be unmapped. */
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaHostRegister");
    pthread_mutex_lock(&mutex);
    int taken = starting_at(pointer) != NULL;
    int kept = !taken && remember((struct range){(uintptr_t)pointer, bytes, 0, -1, 0});
    pthread_mutex_unlock(&mutex);
    if (kept) return cudaSuccess;
    return rt_fail(taken ? cudaErrorHostMemoryAlreadyRegistered : cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void *pointer) {
    ENTER("cudaHostUnregister");
    return host_release(pointer, 0);
}

/* Unified addressing: a device reads pinned memory at its address on the host. */
cudaError_t cudaHostGetDevicePointer(void **device, void *pointer, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaHostGetDevicePointer");
    pthread_mutex_lock(&mutex);
    struct range *range = holding(pointer);
    int pinned = range && range->device < 0;
    pthread_mutex_unlock(&mutex);
    *device = pinned ? pointer : NULL;
    return pinned ? cudaSuccess : rt_fail(cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    ENTER_CONTEXT("cudaPointerGetAttributes");
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&mutex);
    struct range *range = holding(pointer);
    attributes->type = !range ? cudaMemoryTypeUnregistered : range->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = !range ? -2 : range->device < 0 ? rt_current() : range->device;
    attributes->devicePointer = range ? (void *)pointer : NULL;
    attributes->hostPointer = range && range->device >= 0 ? NULL : (void *)pointer;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    (void)kind;
    ENTER_CONTEXT("cudaMemcpy");
    SAFE_OR_FAIL();
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER_CONTEXT("cudaMemcpyAsync");
    if (kind != cudaMemcpyDeviceToDevice) memmove(to, from, bytes); /* on the device values are garbage anyway */
    return rt_submit(stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    (void)to, (void)to_device, (void)from, (void)from_device, (void)bytes;
    ENTER_CONTEXT("cudaMemcpyPeerAsync");
    return rt_submit(stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER_CONTEXT("cudaMemcpy2DAsync");
    for (size_t row = 0; kind != cudaMemcpyDeviceToDevice && row < rows; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return rt_submit(stream);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
    (void)symbol, (void)from, (void)bytes, (void)offset, (void)kind;
    ENTER_CONTEXT("cudaMemcpyToSymbol");
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    (void)to, (void)value, (void)bytes;
    ENTER_CONTEXT("cudaMemset");
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    (void)to, (void)value, (void)bytes;
    ENTER_CONTEXT("cudaMemsetAsync");
    return rt_submit(stream);
}

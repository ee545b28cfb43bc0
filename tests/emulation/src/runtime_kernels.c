/* Kernels and cuBLAS do nothing and succeed, so that training steps run with their real memory pattern; the values are
 * garbage. Kernel registration is here too, so that no call reaches the real runtime. build.py generates the other
 * functions that the installed torch imports. */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdlib.h>
#include <string.h>

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configured;

void **__cudaRegisterFatBinary(void *image) {
    static void *handle;
    (void)image;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *warp) {
    (void)handle, (void)host, (void)device, (void)name, (void)limit;
    (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configured.grid = grid;
    configured.block = block;
    configured.shared = shared;
    configured.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid;
    *block = configured.block;
    *shared = configured.shared;
    *(void **)stream = configured.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
    ENTER_CONTEXT("cudaLaunchKernel");
    return rt_submit(stream);
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    (void)function, (void)arguments;
    ENTER_CONTEXT("cudaLaunchKernel");
    return rt_submit(config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    (void)function, (void)size, (void)shared;
    ENTER("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    *blocks = 1;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                   size_t shared, unsigned int flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    ENTER("cudaFuncGetAttributes");
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    (void)function, (void)attribute, (void)value;
    ENTER("cudaFuncSetAttribute");
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    ENTER_CONTEXT("cudaGetSymbolAddress");
    *pointer = (void *)symbol;
    return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

static int new_handle(void **handle) {
    *handle = calloc(1, 4096);
    return *handle ? 0 : 3; /* CUBLAS_STATUS_ALLOC_FAILED */
}
int cublasCreate_v2(void **handle) { return new_handle(handle); }
int cublasLtCreate(void **handle) { return new_handle(handle); }
int cublasDestroy_v2(void *handle) {
    free(handle);
    return 0;
}
int cublasLtDestroy(void *handle) { return cublasDestroy_v2(handle); }
int cublasGetVersion_v2(void *handle, int *version) {
    (void)handle;
    *version = CUDART_VERSION / 1000 * 10000;
    return 0;
}
size_t cublasLtGetVersion(void) { return CUDART_VERSION / 1000 * 10000; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted, (void)results;
    *found = 1;
    return 0;
}

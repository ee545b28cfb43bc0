/* hammer THREADS OPERATIONS: allocates and frees device memory at random on every thread as fast as possible, and reads
 * the free memory in between. Prints "[held bytes, allocations, refusals]" and runs until its stdin ends. With 0
 * operations it never ends, and another thread only reads the free memory, so that the node's lock is mostly held. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { HELD = 64, PAGE = 2 << 20, OUT_OF_MEMORY = 2 };
static int (*allocate)(void **, size_t), (*release)(void *), (*ask)(size_t *, size_t *);
static long operations;
static unsigned long long held_bytes, allocations, refusals;

static void *hammer(void *seed) {
    void *held[HELD] = {0};
    size_t size[HELD], free_bytes, total_bytes;
    unsigned state = (unsigned)(size_t)seed;
    for (long i = 0; !operations || i < operations; i++) {
        int at = rand_r(&state) % HELD;
        if (held[at]) {
            if (release(held[at])) abort();
            held[at] = NULL;
            __atomic_sub_fetch(&held_bytes, size[at], __ATOMIC_RELAXED);
        } else {
            size_t pages = 1 + (size_t)rand_r(&state) % 8;
            int error = allocate(&held[at], pages * PAGE - (size_t)rand_r(&state) % PAGE);
            if (error && error != OUT_OF_MEMORY) abort();
            if (error) held[at] = NULL;
            size[at] = pages * PAGE;
            __atomic_add_fetch(error ? &refusals : &allocations, 1, __ATOMIC_RELAXED);
            if (!error) __atomic_add_fetch(&held_bytes, size[at], __ATOMIC_RELAXED);
        }
        if (i % 4 == 0 && ask(&free_bytes, &total_bytes)) abort();
    }
    return NULL;
}

static void *ask_only(void *unused) {
    size_t free_bytes, total_bytes;
    while (!ask(&free_bytes, &total_bytes)) {
    }
    return unused;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    allocate = (int (*)(void **, size_t))dlsym(RTLD_DEFAULT, "cudaMalloc");
    release = (int (*)(void *))dlsym(RTLD_DEFAULT, "cudaFree");
    ask = (int (*)(size_t *, size_t *))dlsym(RTLD_DEFAULT, "cudaMemGetInfo");
    if (!allocate || !release || !ask || release(NULL)) return 1;
    puts("[]");
    fflush(stdout);
    if (getchar() == EOF) return 0;
    int threads = atoi(arguments[1]);
    operations = atol(arguments[2]);
    pthread_t thread[64], asker;
    if (!operations) pthread_create(&asker, NULL, ask_only, NULL);
    for (int i = 0; i < threads; i++) pthread_create(&thread[i], NULL, hammer, (void *)(size_t)(i + 1));
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    printf("[%llu, %llu, %llu]\n", held_bytes, allocations, refusals);
    fflush(stdout);
    while (getchar() != EOF) {
    }
    return 0;
}

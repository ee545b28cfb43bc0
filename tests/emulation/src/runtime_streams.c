/* Streams, events, stream capture and graphs. Work completes when it is submitted, so every stream is always idle. This
 * file tracks captures and applies the rules of the programming guide on forbidden calls:
 *   - a thread in the global mode (the default) may not make unsafe calls while it captures itself (unless relaxed), nor
 *     while any other thread captures in the global mode;
 *   - a thread in the thread-local mode may not while it captures itself; a relaxed one always may.
 * A forbidden call returns cudaErrorStreamCaptureUnsupported (900) and invalidates the capture. The end of that capture
 * returns cudaErrorStreamCaptureInvalidated (901). */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct graph {
    size_t nodes;
    struct kept *kept;
};
struct capture {
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    int thread, spoiled;
    struct graph *graph;
    cudaStream_t origin;
    struct capture *next;
};
struct stream { /* the target of a cudaStream_t */
    unsigned int flags;
    int priority, device;
    unsigned long long capture; /* id of the capture it belongs to; stale ids belong to none */
};
struct event {
    unsigned long long capture;
    struct timespec recorded;
    int is_recorded;
};
struct user_object { /* the target of a cudaUserObject_t */
    void *pointer;
    cudaHostFn_t destroy;
    unsigned int references;
};
struct kept { /* references of a graph */
    struct user_object *object;
    unsigned int references;
    struct kept *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static int capturing; /* the number of active captures */
static unsigned long long next_id = 1;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static __thread int thread_id;

static int my_thread(void) { return thread_id ? thread_id : (thread_id = gettid()); }
static int is_default(cudaStream_t stream) { return (uintptr_t)stream <= 2; /* null, legacy, per thread */ }

static struct capture *by_id(unsigned long long id) {
    struct capture *capture = captures;
    while (capture && capture->id != id) capture = capture->next;
    return capture;
}

/* The caller holds the mutex. */
static struct capture *capture_of(cudaStream_t stream) {
    return is_default(stream) || !captures ? NULL : by_id(((struct stream *)stream)->capture);
}

cudaError_t rt_unsafe(void) {
    if (!__atomic_load_n(&capturing, __ATOMIC_ACQUIRE) || thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    cudaError_t result = cudaSuccess;
    pthread_mutex_lock(&mutex);
    for (struct capture *capture = captures; capture; capture = capture->next) {
        int own = capture->thread == my_thread() && capture->mode != cudaStreamCaptureModeRelaxed;
        int global = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (!own && !global) continue;
        capture->spoiled = 1;
        result = cudaErrorStreamCaptureUnsupported;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

cudaError_t rt_submit(cudaStream_t stream) {
    if (!__atomic_load_n(&capturing, __ATOMIC_ACQUIRE)) return cudaSuccess;
    cudaError_t result = cudaSuccess;
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    if (capture && capture->spoiled) result = cudaErrorStreamCaptureInvalidated;
    else if (capture) capture->graph->nodes++;
    pthread_mutex_unlock(&mutex);
    return rt_fail(result);
}

/* Waiting for a capturing stream fails and invalidates its capture. */
static cudaError_t wait_for(cudaStream_t stream) {
    cudaError_t result = rt_unsafe();
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    if (capture) {
        capture->spoiled = 1;
        result = cudaErrorStreamCaptureUnsupported;
    }
    pthread_mutex_unlock(&mutex);
    return rt_fail(result);
}

static cudaError_t create_stream(cudaStream_t *stream, unsigned int flags, int priority) {
    struct stream *made = calloc(1, sizeof *made);
    if (!made) return rt_fail(cudaErrorMemoryAllocation);
    *made = (struct stream){flags, priority, rt_current(), 0};
    *stream = (cudaStream_t)made;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    ENTER_CONTEXT("cudaStreamCreate");
    return create_stream(stream, 0, 0);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    ENTER_CONTEXT("cudaStreamCreateWithFlags");
    return create_stream(stream, flags, 0);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    ENTER_CONTEXT("cudaStreamCreateWithPriority");
    return create_stream(stream, flags, priority);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    ENTER("cudaStreamDestroy");
    if (!is_default(stream)) free(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    ENTER("cudaStreamGetPriority");
    *priority = is_default(stream) ? 0 : ((struct stream *)stream)->priority;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER_CONTEXT("cudaStreamQuery");
    return wait_for(stream);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER_CONTEXT("cudaStreamSynchronize");
    return wait_for(stream);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaStreamAddCallback");
    cudaError_t submitted = rt_submit(stream);
    if (submitted == cudaSuccess) callback(stream, cudaSuccess, data);
    return submitted;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    ENTER_CONTEXT("cudaLaunchHostFunc");
    cudaError_t submitted = rt_submit(stream);
    if (submitted == cudaSuccess) function(data);
    return submitted;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaEventCreateWithFlags");
    *event = (cudaEvent_t)calloc(1, sizeof(struct event));
    return *event ? cudaSuccess : rt_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENTER("cudaEventDestroy");
    free(event);
    return cudaSuccess;
}

/* An event recorded on a capturing stream carries the capture to the stream that waits for it. */
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaEventRecord");
    struct event *event = (struct event *)handle;
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    event->capture = capture ? capture->id : 0;
    event->is_recorded = 1;
    clock_gettime(CLOCK_MONOTONIC, &event->recorded);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned int flags) {
    (void)flags;
    ENTER_CONTEXT("cudaStreamWaitEvent");
    pthread_mutex_lock(&mutex);
    struct capture *capture = by_id(((struct event *)handle)->capture);
    if (capture && !is_default(stream)) ((struct stream *)stream)->capture = capture->id;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

static cudaError_t wait_for_event(cudaEvent_t handle) {
    cudaError_t result = rt_unsafe();
    pthread_mutex_lock(&mutex);
    struct capture *capture = by_id(((struct event *)handle)->capture);
    if (capture) {
        capture->spoiled = 1;
        result = cudaErrorCapturedEvent;
    }
    pthread_mutex_unlock(&mutex);
    return rt_fail(result);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER_CONTEXT("cudaEventQuery");
    return wait_for_event(event);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER_CONTEXT("cudaEventSynchronize");
    return wait_for_event(event);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    ENTER_CONTEXT("cudaEventElapsedTime");
    struct event *start = (struct event *)from, *end = (struct event *)to;
    if (!start->is_recorded || !end->is_recorded) return rt_fail(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(end->recorded.tv_sec - start->recorded.tv_sec) * 1e3f +
                    (float)(end->recorded.tv_nsec - start->recorded.tv_nsec) * 1e-6f;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    ENTER_CONTEXT("cudaStreamBeginCapture");
    if (is_default(stream)) return rt_fail(cudaErrorStreamCaptureUnsupported);
    struct capture *capture = calloc(1, sizeof *capture);
    struct graph *graph = calloc(1, sizeof *graph);
    if (!capture || !graph) return rt_fail(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&mutex);
    int twice = capture_of(stream) != NULL;
    if (!twice) {
        *capture = (struct capture){next_id++, mode, my_thread(), 0, graph, stream, captures};
        captures = capture;
        ((struct stream *)stream)->capture = capture->id;
        __atomic_add_fetch(&capturing, 1, __ATOMIC_ACQ_REL);
    }
    pthread_mutex_unlock(&mutex);
    if (!twice) return cudaSuccess;
    free(capture);
    free(graph);
    return rt_fail(cudaErrorIllegalState);
}

static void destroy_graph(struct graph *graph);

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    ENTER_CONTEXT("cudaStreamEndCapture");
    *graph = NULL;
    cudaError_t result = cudaSuccess;
    struct graph *broken = NULL;
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    if (!capture) result = cudaErrorIllegalState;
    else if (capture->origin != stream) result = cudaErrorStreamCaptureUnmatched;
    else if (capture->thread != my_thread() && capture->mode != cudaStreamCaptureModeRelaxed)
        result = cudaErrorStreamCaptureWrongThread;
    else {
        struct capture **link = &captures;
        while (*link != capture) link = &(*link)->next;
        *link = capture->next;
        __atomic_sub_fetch(&capturing, 1, __ATOMIC_ACQ_REL);
        if (capture->spoiled) {
            result = cudaErrorStreamCaptureInvalidated;
            broken = capture->graph;
        } else {
            *graph = (cudaGraph_t)capture->graph;
        }
        free(capture);
    }
    pthread_mutex_unlock(&mutex);
    if (broken) destroy_graph(broken);
    return rt_fail(result);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENTER("cudaStreamIsCapturing");
    *status = cudaStreamCaptureStatusNone;
    if (!__atomic_load_n(&capturing, __ATOMIC_ACQUIRE)) return cudaSuccess;
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    if (capture) *status = capture->spoiled ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph, const cudaGraphNode_t **dependencies, size_t *count) {
    ENTER("cudaStreamGetCaptureInfo");
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    if (capture) {
        *status = capture->spoiled ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
        if (id) *id = capture->id;
        if (graph) *graph = (cudaGraph_t)capture->graph;
        if (dependencies) *dependencies = NULL;
        if (count) *count = 0;
    }
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    if (edges) *edges = NULL;
    return capture_info(stream, status, id, graph, dependencies, count);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *dependencies,
                                                const cudaGraphEdgeData *edges, size_t count, unsigned int flags) {
    (void)stream, (void)dependencies, (void)edges, (void)count, (void)flags;
    ENTER("cudaStreamUpdateCaptureDependencies");
    return cudaSuccess;
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies, size_t *count) {
    return capture_info(stream, status, id, graph, dependencies, count);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *dependencies, size_t count,
                                                unsigned int flags) {
    (void)stream, (void)dependencies, (void)count, (void)flags;
    ENTER("cudaStreamUpdateCaptureDependencies");
    return cudaSuccess;
}
#endif

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* Called without a lock, because a destructor may call the runtime. */
static void release_object(struct user_object *object, unsigned int count) {
    if (__atomic_sub_fetch(&object->references, count, __ATOMIC_ACQ_REL)) return;
    object->destroy(object->pointer);
    free(object);
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer, cudaHostFn_t destroy, unsigned int references,
                                 unsigned int flags) {
    (void)flags;
    ENTER("cudaUserObjectCreate");
    struct user_object *made = calloc(1, sizeof *made);
    if (!made) return rt_fail(cudaErrorMemoryAllocation);
    *made = (struct user_object){pointer, destroy, references};
    *object = (cudaUserObject_t)made;
    return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
    ENTER("cudaUserObjectRelease");
    release_object((struct user_object *)object, count);
    return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t handle, cudaUserObject_t object, unsigned int count,
                                      unsigned int flags) {
    ENTER("cudaGraphRetainUserObject");
    struct kept *kept = calloc(1, sizeof *kept);
    if (!kept) return rt_fail(cudaErrorMemoryAllocation);
    struct graph *graph = (struct graph *)handle;
    if (flags != cudaGraphUserObjectMove)
        __atomic_add_fetch(&((struct user_object *)object)->references, count, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&mutex);
    *kept = (struct kept){(struct user_object *)object, count, graph->kept};
    graph->kept = kept;
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

static void destroy_graph(struct graph *graph) {
    for (struct kept *kept = graph->kept, *next; kept; kept = next) {
        next = kept->next;
        release_object(kept->object, kept->references);
        free(kept);
    }
    free(graph);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    ENTER("cudaGraphDestroy");
    destroy_graph((struct graph *)graph);
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    ENTER("cudaGraphGetNodes");
    if (!nodes) *count = ((struct graph *)graph)->nodes;
    else *count = 0; /* nodes are counted, not stored */
    return cudaSuccess;
}

static cudaError_t instantiate(cudaGraphExec_t *made) {
    ENTER_CONTEXT("cudaGraphInstantiate");
    *made = (cudaGraphExec_t)calloc(1, 64);
    return *made ? cudaSuccess : rt_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    (void)graph, (void)flags;
    return instantiate(made);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    (void)graph, (void)flags;
    return instantiate(made);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) {
    ENTER("cudaGraphExecDestroy");
    free(made);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t stream) {
    (void)made;
    ENTER_CONTEXT("cudaGraphLaunch");
    return rt_submit(stream);
}

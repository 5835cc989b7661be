/* What the compiled kernels have in common. */
#include <stdint.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

/* Denormal floats slow a CPU down tenfold; what they could add to a metric is nothing. */
static inline unsigned flush_denormals(void) {
#ifdef __SSE2__
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

static inline void restore(unsigned before) {
#ifdef __SSE2__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

static inline int thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static inline int team(void) {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

/* How many threads so many numbers are worth: one, where waking another takes longer than the work. */
static inline int worth(int64_t numbers, int threads) { return numbers < 16384 ? 1 : threads; }

/* What turns a gradient into a step (quasidiag.kernels.rule). */
typedef struct {
    float lr, decay, momentum; /* theta <- decay * theta - lr * buffer */
    float eps, floor, scale;   /* the gradient is scale * v */
} rule;

/* Riemannian gradient of the diagonal reduction, of n numbers. */
static inline void divide(int64_t n, const float *m, const float *v, float *w, rule r) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float plus = m[i] + r.eps, d = plus > r.floor ? plus : r.floor;
        w[i] = d > 0 ? r.scale * v[i] / d : 0.0f;
    }
}

static inline void apply(int64_t n, const float *w, float *buffer, float *theta, rule r) {
    if (buffer) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) buffer[i] = r.momentum * buffer[i] + w[i];
        w = buffer;
    }
    if (theta) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) theta[i] = r.decay * theta[i] - r.lr * w[i];
    }
}

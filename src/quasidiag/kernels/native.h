/* What the compiled kernels have in common. */
#include <stddef.h>
#include <stdint.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

/* Denormal floats slow a CPU down tenfold, and add nothing to a metric. */
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

/* How many threads to use for this many numbers: one, where waking another takes longer than the work. */
static inline int worth(int64_t numbers, int threads) { return numbers < 16384 ? 1 : threads; }

static inline int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

static inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

/* A buffer of `size` floats. */
typedef struct {
    size_t size;
    float numbers[] __attribute__((aligned(64)));
} room;

/* A buffer of at least `size` floats, to be given back, or NULL if memory runs out (native.c). */
room *borrow(size_t size);
void give_back(room *mine);

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

/* average <- average + by (gradient - average); found <- the same applied once more, times `factor` (proposal.averaged_). */
static inline void average(int64_t n, float *average, const float *gradient, float *found, float by, float factor) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float g = gradient[i], now = average[i] + by * (g - average[i]);
        average[i] = now;
        found[i] = factor * (now + by * (g - now));
    }
}

/* Eight units in the last place: an input that varied by less counts as constant (reductions.varies). */
static const float UNIT = 8 * 1.1920929e-07f;

/* Algorithm 1 for one unit: writes the weights' Riemannian gradient into w and returns the bias's. */
static inline float solve(int64_t n, float m00, const float *m0i, const float *mii, float g0, const float *vi,
                          const float *shift, int shifted, float *w, rule r) {
    const float v0 = r.scale * g0;
    const float d0 = m00 + r.eps, inverse0 = d0 > 0 ? 1 / d0 : 0, least = r.floor * inverse0;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        const float c = shift[i], row = m0i[i] - r.eps * c, mu = row * inverse0;
        const float diagonal = mii[i] + r.eps * (1 + c * c), variance = diagonal - mu * row;
        const float centred = r.scale * vi[i] - (c + mu) * v0, uc = UNIT * c;
        const int alive = (variance > UNIT * diagonal) & (!shifted | (mii[i] > m00 * (uc * uc)));
        const float x = alive ? centred / (variance > least ? variance : least) : 0.0f;
        w[i] = x;
        sum += (row + d0 * c) * x;
    }
    return d0 > 0 ? (v0 - sum) / d0 : 0; /* the sum is of (r_i + D0 c_i) w_i */
}

/* native.c */
void qd_quasi_diagonal(int64_t rows, int64_t n, const float *m00, const float *m0i, const float *mii,
                       const float *v0, const float *vi, const float *shift, int shifted, float *w0,
                       float *wi, float *buffer0, float *bufferi, float *theta0, float *thetai, rule r,
                       int threads);

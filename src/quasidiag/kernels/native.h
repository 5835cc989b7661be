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

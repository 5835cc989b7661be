/* Words: pairs of bfloat16, which processors multiply two at a time. To be included after orthogonal.h, if BF16. */
#include <string.h>

#define BFLOAT16 __attribute__((target("avx512bf16")))

/* The transpose of LANES x LANES words: their two halves are shuffled like cards, once for each bit of LANES - 1. */
static inline void transpose(float *x) {
    enum { HALVES = LANES * LANES / 2 };
    float y[2 * HALVES] __attribute__((aligned(64)));
    for (int times = 1; times < LANES; times *= 2) {
        memcpy(y, x, sizeof y);
#pragma omp simd
        for (int i = 0; i < HALVES; i++) {
            x[2 * i] = y[i];
            x[2 * i + 1] = y[HALVES + i];
        }
    }
}

/* The first `count` of LANES numbers, then zeros. */
static inline __m512 load(int64_t count, const float *from) {
    return _mm512_maskz_loadu_ps((1u << least(LANES, count > 0 ? count : 0)) - 1, from);
}

/* The pairs of `by` times `count` numbers that follow each other, then zeros up to LANES pairs. */
BFLOAT16 static inline void join(float *to, const float *from, int64_t count, float by) {
    const __m512 left = load(count, from), right = load(count - LANES, from + LANES);
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(by * right, by * left));
}

/* The pairs of numbers of two vectors, one from each. */
BFLOAT16 static inline __m512i paired(__m512 first, __m512 second) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* The moments of a dense layer, all three together (quasidiag.moments.linear is the oracle):
 *
 *     m00 <- keep m00 + gain sum w,   m0i <- keep m0i + gain w^T (a - c),   mii <- keep mii + gain w^T (a - c)^2.
 *
 * If `scale` is not 0, the array w holds derivatives d, and the weights are (scale d)^2. If there are thetas, they take
 * their step as soon as a group of units has its moments.
 *
 * A matrix product in the usual blocks, which saves two things over a library's: a - c, its square and (scale d)^2 are
 * computed while packing and never written to memory, and w is packed once for both products. A tile of the result stays
 * in registers while the samples go by. Every number is summed in the same order on any number of threads.
 */
#include <stdint.h>
#include <string.h>

#include "native.h"

/* A tile is UNITS x INPUTS and takes 12 of AVX2's 16 registers. SAMPLES x INPUTS numbers fill a first-level cache,
 * GROUP panels of UNITS x SAMPLES half of a second-level one, COLUMNS panels of inputs part of the last. */
enum { LANES = 8, UNITS = 6, INPUTS = 2 * LANES, SAMPLES = 512, GROUP = 24, COLUMNS = 64, BAND = 8 };

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    int64_t rows, n, units;
    const float *a, *w, *shift;
    float *m00, *m0i, *mii;
    float keep, gain, scale, smallest;
    const float *v0, *vi;
    float *theta0, *thetai;
    rule r;
} problem;

/* One tile: c <- beta c + gain x^T y, over `k` samples. Only `units` x `inputs` of it exist. Not inlined, or the
 * compiler may run out of registers, which halves the speed. */
__attribute__((noinline)) static void tile(int64_t k, const float *x, const float *y, float *c, int64_t n,
                                           float beta, float gain, int64_t units, int64_t inputs) {
    vector sum[UNITS][2];
#pragma GCC unroll 16
    for (int i = 0; i < UNITS; i++) sum[i][0] = sum[i][1] = (vector){0};
    for (int64_t i = 0; i < units; i++) __builtin_prefetch(c + i * n, 1);
#pragma GCC unroll 4
    for (int64_t s = 0; s < k; s++, x += UNITS, y += INPUTS) {
        const vector left = *(const vector *)y, right = *(const vector *)(y + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < UNITS; i++) {
            sum[i][0] += x[i] * left;
            sum[i][1] += x[i] * right;
        }
    }
    if (units == UNITS && inputs == INPUTS) {
#pragma GCC unroll 16
        for (int i = 0; i < UNITS; i++, c += n) {
            *(loose *)c = beta * *(loose *)c + gain * sum[i][0];
            *(loose *)(c + LANES) = beta * *(loose *)(c + LANES) + gain * sum[i][1];
        }
    } else {
        const float *all = (const float *)sum;
        for (int64_t i = 0; i < units; i++, c += n)
            for (int64_t j = 0; j < inputs; j++) c[j] = beta * c[j] + gain * all[i * INPUTS + j];
    }
}

/* Packs panels `first` to `last`, of INPUTS columns each, of a - c (if m0i is kept) and of its square, sample after
 * sample, with zeros for missing columns. A few samples at a time, so that `a` is read along its rows. */
static void pack_inputs(const problem *p, int64_t start, int64_t k, int64_t column, int64_t first, int64_t last,
                        float *y) {
    for (int64_t band = 0; band < k; band += BAND)
        for (int64_t v = first; v < last; v++) {
            const int64_t input = column + v * INPUTS, there = least(p->n - input, INPUTS);
            float c[INPUTS] = {0}, end[INPUTS] = {0};
            for (int64_t j = 0; p->shift && j < there; j++) c[j] = p->shift[input + j];
            for (int64_t s = band; s < least(k, band + BAND); s++) {
                const float *a = p->a + (start + s) * p->n + input;
                float *x = y + (2 * v * k + s) * INPUTS, *xx = x + k * INPUTS;
                if (there < INPUTS) a = memcpy(end, a, there * sizeof(float));
                if (p->m0i)
#pragma omp simd
                    for (int64_t j = 0; j < INPUTS; j++) x[j] = a[j] - c[j], xx[j] = x[j] * x[j];
                else
#pragma omp simd
                    for (int64_t j = 0; j < INPUTS; j++) xx[j] = (a[j] - c[j]) * (a[j] - c[j]);
            }
        }
}

/* Packs panels `first` to `last`, of UNITS columns each, of the weights, likewise. */
static void pack_units(const problem *p, int64_t start, int64_t k, int64_t first, int64_t last, float *x) {
    for (int64_t band = 0; band < k; band += BAND)
        for (int64_t u = first; u < last; u++) {
            const int64_t there = least(p->units - u * UNITS, UNITS);
            for (int64_t s = band; s < least(k, band + BAND); s++) {
                const float *w = p->w + (start + s) * p->units + u * UNITS;
                float *to = x + ((u - first) * k + s) * UNITS;
                if (there == UNITS)
                    memcpy(to, w, UNITS * sizeof(float));
                else
                    for (int64_t i = 0; i < UNITS; i++) to[i] = i < there ? w[i] : 0.0f;
                if (p->scale != 0)
#pragma omp simd
                    for (int64_t i = 0; i < UNITS; i++) {
                        const float d = p->scale * to[i], dd = d * d;
                        to[i] = dd < p->smallest ? 0.0f : dd;
                    }
            }
        }
}

/* Updates m00 of `units` units from their packed weights. */
static void sum_units(int64_t k, const float *x, float *m00, float beta, float gain, int64_t units) {
    float sum[UNITS] = {0};
    for (int64_t s = 0; s < k; s++, x += UNITS)
#pragma GCC unroll 16
        for (int i = 0; i < UNITS; i++) sum[i] += x[i];
    for (int64_t i = 0; i < units; i++) m00[i] = beta * m00[i] + gain * sum[i];
}

/* The step of the units from `unit` to `end`, for their inputs from `left` to `right`: all inputs, or in the diagonal
 * reduction some; the call with input 0 also moves the bias. */
static void descend(const problem *p, int64_t unit, int64_t end, int64_t left, int64_t right) {
    float w[COLUMNS * INPUTS], w0;
    for (; unit < end; unit++) {
        const int64_t at = unit * p->n + left;
        if (p->m0i)
            w0 = solve(p->n, p->m00[unit], p->m0i + at, p->mii + at, p->v0[unit], p->vi + at, p->shift,
                       1, w, p->r);
        else {
            divide(right - left, p->mii + at, p->vi + at, w, p->r);
            divide(1, p->m00 + unit, p->v0 + unit, &w0, p->r);
        }
        apply(right - left, w, NULL, p->thetai + at, p->r);
        if (left == 0) apply(1, &w0, NULL, p->theta0 + unit, p->r);
    }
}

/* Computes the tiles of the panels of units from `first` to `last` and the panels of inputs from `left` to `right` of those
 * in y, and then the step, after the last samples. */
static void group(const problem *p, int64_t start, int64_t k, int64_t first, int64_t last, int64_t column,
                  int64_t left, int64_t right, const float *y, float *x, int whole) {
    const float beta = start ? 1.0f : p->keep;
    pack_units(p, start, k, first, last, x);
    for (int64_t u = first; whole && p->m00 && u < last; u++)
        sum_units(k, x + (u - first) * UNITS * k, p->m00 + u * UNITS, beta, p->gain,
                  least(p->units - u * UNITS, UNITS));
    for (int64_t v = left; v < right; v++) {
        const int64_t input = column + v * INPUTS, inputs = least(p->n - input, INPUTS);
        for (int square = p->m0i == NULL; square < 2; square++) {
            float *c = (square ? p->mii : p->m0i) + input;
            const float *packed = y + (2 * v + square) * INPUTS * k;
            for (int64_t u = first; u < last; u++) {
                const int64_t unit = u * UNITS;
                tile(k, x + (u - first) * UNITS * k, packed, c + unit * p->n, p->n, beta, p->gain,
                     least(p->units - unit, UNITS), inputs);
            }
        }
    }
    if (p->thetai && start + k == p->rows)
        descend(p, first * UNITS, least(p->units, last * UNITS), column + left * INPUTS,
                least(p->n, column + right * INPUTS));
}

/* m00, m0i, shift and the arrays of the step (v and theta) may be NULL; a step with m0i needs the shift. Returns 0 and does
 * nothing if memory runs out. */
int qd_products(int64_t rows, int64_t n, int64_t units, const float *a, const float *w, const float *shift,
                float *m00, float *m0i, float *mii, float keep, float gain, float scale, float smallest,
                const float *v0, const float *vi, float *theta0, float *thetai, rule r, int threads) {
    const int64_t samples = parts(rows, parts(rows, SAMPLES));
    const int64_t columns = least(parts(n, INPUTS), COLUMNS), panels = parts(units, UNITS);
    /* Enough groups for even shares; if there are fewer groups than threads, the inputs are divided among threads too. */
    const int64_t groups = least(panels, threads * parts(parts(panels, GROUP), threads));
    const int64_t shares = groups < threads ? parts(threads, groups) : 1;
    /* A unit's solve needs all of its inputs; if no thread has them all at once, the step comes at the end. */
    const int late = thetai && m0i && (shares > 1 || columns * INPUTS < n);
    const problem p = {rows, n,     units,    a,  w,  shift,  m00,                  m0i, mii, keep,
                       gain, scale, smallest, v0, vi, theta0, late ? NULL : thetai, r};
    const int64_t inputs = 2 * columns * INPUTS * samples, each = parts(panels, groups) * UNITS * samples;
    room *packed = borrow(inputs + threads * each);
    if (!packed) return 0;
    float *y = packed->numbers, *xs = y + inputs;
#pragma omp parallel num_threads(threads)
    {
        const unsigned before = flush_denormals();
        for (int64_t column = 0; column < n; column += columns * INPUTS)
            for (int64_t start = 0; start < rows; start += samples) {
                const int64_t k = least(rows - start, samples);
                const int64_t here = least(parts(n - column, INPUTS), columns);
#pragma omp for schedule(static)
                for (int64_t t = 0; t < threads; t++)
                    pack_inputs(&p, start, k, column, here * t / threads, here * (t + 1) / threads, y);
#pragma omp for schedule(static)
                for (int64_t i = 0; i < groups * shares; i++) {
                    const int64_t g = i / shares, part = i % shares;
                    group(&p, start, k, panels * g / groups, panels * (g + 1) / groups, column,
                          here * part / shares, here * (part + 1) / shares, y, xs + thread() * each,
                          part == 0 && column == 0);
                }
            }
        restore(before);
    }
    give_back(packed);
    if (late)
        qd_quasi_diagonal(units, n, m00, m0i, mii, v0, vi, shift, 1, NULL, NULL, NULL, NULL, theta0, thetai, r,
                          threads);
    return 1;
}

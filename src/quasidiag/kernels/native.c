/* The elementwise work of a step on a CPU, each in one pass over memory.
 *
 * Compiled at first use (building.py); the oracles are quasidiag.reductions, quasidiag.moments, quasidiag.root and, in
 * quasidiag.auto, proportions, proposal, moving, rest and directions. Rows are divided among as many threads as torch may
 * use.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

/* The buffer that is kept for the next call: new memory costs a page fault every 4 KiB. */
static room *kept = NULL;

room *borrow(size_t size) {
    room *mine = __atomic_exchange_n(&kept, NULL, __ATOMIC_ACQ_REL);
    if (mine && mine->size >= size) return mine;
    free(mine);
    mine = aligned_alloc(64, sizeof(room) + parts(size, 16) * 64);
    if (mine) mine->size = size;
    return mine;
}

void give_back(room *mine) { free(__atomic_exchange_n(&kept, mine, __ATOMIC_ACQ_REL)); }

/* The size of several arrays together. */
static int64_t total(int64_t count, const int64_t *sizes) {
    int64_t all = 0;
    for (int64_t k = 0; k < count; k++) all += sizes[k];
    return all;
}

/* Arrays are worked on in chunks of this many numbers. */
enum { CHUNK = 2048 };

/* Algorithm 1 and then the step, for every unit of a layer. Any of w, buffers and thetas may be NULL. */
void qd_quasi_diagonal(int64_t rows, int64_t n, const float *m00, const float *m0i, const float *mii,
                       const float *v0, const float *vi, const float *shift, int shifted,
                       float *w0, float *wi, float *buffer0, float *bufferi, float *theta0,
                       float *thetai, rule r, int threads) {
#pragma omp parallel num_threads(worth(rows * n, threads))
    {
        const unsigned before = flush_denormals();
        float *scratch = wi ? NULL : malloc(n * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t k = 0; k < rows; k++) {
            float *w = wi ? wi + k * n : scratch;
            const float x = solve(n, m00[k], m0i + k * n, mii + k * n, v0[k], vi + k * n, shift, shifted, w, r);
            if (w0) w0[k] = x;
            apply(n, w, bufferi ? bufferi + k * n : NULL, thetai ? thetai + k * n : NULL, r);
            apply(1, &x, buffer0 ? buffer0 + k : NULL, theta0 ? theta0 + k : NULL, r);
        }
        free(scratch);
        restore(before);
    }
}

/* The diagonal reduction and then the step, of several arrays. Any of ws, buffers and thetas may be NULL. */
void qd_diagonal(int64_t count, const int64_t *sizes, const float *const *ms, const float *const *vs,
                 float *const *ws, float *const *buffers, float *const *thetas, rule r, int threads) {
#pragma omp parallel num_threads(worth(total(count, sizes), threads))
    {
        const unsigned before = flush_denormals();
        float scratch[CHUNK];
        for (int64_t k = 0; k < count; k++) {
            const float *m = ms[k], *v = vs[k];
#pragma omp for schedule(static) nowait
            for (int64_t start = 0; start < sizes[k]; start += CHUNK) {
                const int64_t size = sizes[k] - start < CHUNK ? sizes[k] - start : CHUNK;
                float *out = ws ? ws[k] + start : scratch;
                divide(size, m + start, v + start, out, r);
                apply(size, out, buffers ? buffers[k] + start : NULL, thetas ? thetas[k] + start : NULL, r);
            }
        }
        restore(before);
    }
}

/* proposal.averaged_ of several arrays. */
void qd_average(int64_t count, const int64_t *sizes, float *const *averages, const float *const *gradients,
                float *const *founds, const float *factors, float by, int threads) {
#pragma omp parallel num_threads(worth(total(count, sizes), threads))
    {
        const unsigned before = flush_denormals();
        for (int64_t k = 0; k < count; k++)
#pragma omp for schedule(static) nowait
            for (int64_t start = 0; start < sizes[k]; start += CHUNK)
                average(least(CHUNK, sizes[k] - start), averages[k] + start, gradients[k] + start, founds[k] + start, by,
                        factors[k]);
        restore(before);
    }
}

static double squares(int64_t n, const float *x) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sum;
}

static double added(int64_t chunks, const double *sums) {
    double sum = 0;
    for (int64_t i = 0; i < chunks; i++) sum += sums[i];
    return sum;
}

static int64_t most_chunks(int64_t count, const int64_t *sizes) {
    int64_t most = 0;
    for (int64_t k = 0; k < count; k++) most = sizes[k] > most ? sizes[k] : most;
    return parts(most, CHUNK);
}

/* theta <- theta - apart, and the sum of its squares. */
static double settle(int64_t n, float *theta, const float *apart) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) theta[i] -= apart[i];
    return squares(n, theta);
}

typedef struct {
    const float *first, *last;
} range;

static int by_address(const void *x, const void *y) {
    const float *a = ((const range *)x)->first, *b = ((const range *)y)->first;
    return (a > b) - (a < b);
}

/* Whether no two arrays overlap in memory. */
static int disjoint(int64_t count, const int64_t *sizes, float *const *arrays) {
    range ranges[count + 1]; /* count may be 0 */
    for (int64_t k = 0; k < count; k++) ranges[k] = (range){arrays[k], arrays[k] + sizes[k]};
    qsort(ranges, count, sizeof *ranges, by_address);
    for (int64_t k = 1; k < count; k++)
        if (ranges[k].first < ranges[k - 1].last) return 0;
    return 1;
}

/* The norm of an array. All threads of a team call it together. */
static void measure(int64_t size, const float *x, double *sums, double *norm) {
#pragma omp for schedule(static)
    for (int64_t start = 0; start < size; start += CHUNK)
        sums[start / CHUNK] = squares(least(CHUNK, size - start), x + start);
#pragma omp single
    *norm = sqrt(added(parts(size, CHUNK), sums));
}

/* w <- by w, theta <- theta + w, apart <- keep (apart + w), way <- way + w, each unless it is NULL (moving.move_). Where
 * there are both an apart and a way, nobody asks for w again, and it stays as it was.
 *
 * With `norms`, thetas that have an `apart` then come to rest, theta <- theta - apart (rest.settle_), and their norms are
 * found, after all have come to rest if they overlap. Without `ws` nothing else happens. Returns 0 if memory runs out. */
int qd_move(int64_t count, const int64_t *sizes, float *const *thetas, float *const *ws, float *const *aparts,
            float *const *ways, float by, float keep, double *norms, int threads) {
    room *mine = borrow(2 * most_chunks(count, sizes));
    if (!mine) return 0;
    double *sums = (double *)mine->numbers;
    const int once = disjoint(count, sizes, thetas);
#pragma omp parallel num_threads(worth(total(count, sizes), threads))
    {
        const unsigned before = flush_denormals();
        for (int64_t k = 0; k < count; k++) {
            float *theta = thetas[k], *w = ws ? ws[k] : NULL, *apart = aparts[k], *way = ws ? ways[k] : NULL;
#pragma omp for schedule(static) /* threads wait at its end, since thetas may overlap */
            for (int64_t start = 0; start < sizes[k]; start += CHUNK) {
                const int64_t last = least(start + CHUNK, sizes[k]);
                if (w)
#pragma omp simd
                    for (int64_t i = start; i < last; i++) {
                        const float u = by * w[i];
                        theta[i] += u;
                        if (way) way[i] += u;
                        if (apart) apart[i] = keep * (apart[i] + u);
                        if (!way || !apart) w[i] = u;
                    }
                if (apart && norms) sums[start / CHUNK] = settle(last - start, theta + start, apart + start);
            }
            if (apart && norms && once)
#pragma omp single
                norms[k] = sqrt(added(parts(sizes[k], CHUNK), sums));
        }
        for (int64_t k = 0; k < count && norms && !once; k++)
            if (aparts[k]) measure(sizes[k], thetas[k], sums, norms + k);
        restore(before);
    }
    give_back(mine);
    return 1;
}

static int as_left(double now, double then, float part) { return fabs(now - then) <= part * then; }

/* theta <- theta + apart if theta's norm is the one in `norms`, up to the part `allowed` of it; else apart <- 0, and the
 * norm in `found` is NaN (rest.lead_). Returns 0 if memory runs out. */
int qd_lead(int64_t count, const int64_t *sizes, float *const *thetas, float *const *aparts, const double *norms,
            const float *allowed, double *found, int threads) {
    room *mine = borrow(2 * most_chunks(count, sizes));
    if (!mine) return 0;
    double *sums = (double *)mine->numbers;
    const int once = disjoint(count, sizes, thetas); /* else one that moves may change what another's norm is */
#pragma omp parallel num_threads(worth(total(count, sizes), threads))
    {
        const unsigned before = flush_denormals();
        for (int64_t k = 0; k < count && !once; k++) measure(sizes[k], thetas[k], sums, found + k);
        for (int64_t k = 0; k < count; k++) {
            if (once) measure(sizes[k], thetas[k], sums, found + k);
            const int same = as_left(found[k], norms[k], allowed[k]);
            float *theta = thetas[k], *apart = aparts[k];
#pragma omp for schedule(static) /* threads wait at its end, since thetas may overlap */
            for (int64_t start = 0; start < sizes[k]; start += CHUNK) {
                const int64_t last = least(start + CHUNK, sizes[k]);
                if (same)
#pragma omp simd
                    for (int64_t i = start; i < last; i++) theta[i] += apart[i];
                else
                    memset(apart + start, 0, (last - start) * sizeof(float));
            }
        }
        restore(before);
    }
    for (int64_t k = 0; k < count; k++)
        if (!as_left(found[k], norms[k], allowed[k])) found[k] = NAN;
    give_back(mine);
    return 1;
}

/* The dot products of pairs of arrays. Returns 0 if memory runs out. */
int qd_dots(int64_t count, const int64_t *sizes, const float *const *xs, const float *const *ys, double *found,
            int threads) {
    room *mine = borrow(2 * most_chunks(count, sizes));
    if (!mine) return 0;
    double *sums = (double *)mine->numbers;
#pragma omp parallel num_threads(worth(total(count, sizes), threads))
    for (int64_t k = 0; k < count; k++) {
        const float *x = xs[k], *y = ys[k];
#pragma omp for schedule(static)
        for (int64_t start = 0; start < sizes[k]; start += CHUNK) {
            const int64_t last = least(start + CHUNK, sizes[k]);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < last; i++) sum += x[i] * y[i];
            sums[start / CHUNK] = sum;
        }
#pragma omp single
        found[k] = added(parts(sizes[k], CHUNK), sums);
    }
    give_back(mine);
    return 1;
}

/* The variance of input i of a unit (quasidiag.root). */
static inline float variance_of(float m0i, float mii, float inverse) { return mii - m0i * inverse * m0i; }

static double mean(int64_t n, const float *x) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum / n;
}

/* The root of a metric (quasidiag.root.quasi_diagonal) of layers of `units` units, each layer with its own shift. `bounds`
 * are those of reductions.safeguarded, or NULL. Returns 0 if memory runs out. */
int qd_root(int64_t rows, int64_t n, int64_t units, const float *m00, const float *m0i, const float *mii,
            const float *shift, const float *bounds, float *bias, float *mu, float *scale, int threads) {
    room *mine = borrow(2 * rows);
    if (!mine) return 0;
    float *first = mine->numbers, *more = first + rows; /* of each unit: m00, and what is added to its variances */
    for (int64_t k = 0; k < rows; k += units) {
        const float dead = bounds ? bounds[2] * (float)mean(units, m00 + k) : 0;
        for (int64_t i = k; i < k + units; i++) first[i] = m00[i] + dead;
    }
#pragma omp parallel num_threads(worth(rows * n, threads))
    {
        const unsigned before = flush_denormals();
        if (bounds) {
#pragma omp for schedule(static)
            for (int64_t k = 0; k < rows; k++) {
                const float *row = m0i + k * n, *square = mii + k * n, inverse = first[k] > 0 ? 1 / first[k] : 0;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < n; i++) {
                    const float variance = variance_of(row[i], square[i], inverse);
                    sum += variance > 0 ? variance : 0;
                }
                more[k] = sum / n;
            }
#pragma omp single
            for (int64_t k = 0; k < rows; k += units) {
                const float layer = bounds[1] * (float)mean(units, more + k);
                for (int64_t i = k; i < k + units; i++) more[i] = bounds[0] * more[i] + layer;
            }
        }
#pragma omp for schedule(static)
        for (int64_t k = 0; k < rows; k++) {
            const float *row = m0i + k * n, *from = mii + k * n, *c = shift ? shift + k / units * n : NULL;
            const float inverse = first[k] > 0 ? 1 / first[k] : 0, plus = bounds ? more[k] : 0;
            float *at = mu + k * n, *s = scale + k * n;
            bias[k] = first[k] > 0 ? 1 / sqrtf(first[k]) : 0;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) {
                const float square = from[i] + plus, variance = variance_of(row[i], square, inverse);
                const float uc = c ? UNIT * c[i] : 0;
                const int alive = (variance > UNIT * square) & ((c == NULL) | (square > first[k] * (uc * uc)));
                at[i] = row[i] * inverse + (c ? c[i] : 0);
                s[i] = alive ? 1 / sqrtf(variance) : 0;
            }
        }
        restore(before);
    }
    give_back(mine);
    return 1;
}

/* A layer whose step is measured; the same as _Measured in native.py. w0, bias and mean may be NULL. */
typedef struct {
    int64_t units, n;
    const float *w0, *wi, *bias, *mean, *scale;
    double total, share; /* of the squared lengths of its units: their sum, and proportions.share */
} measured;

/* The squared length of unit k's step in the metric, |A w|^2. */
static float squared(const measured *of, int64_t k) {
    const int64_t n = of->n;
    const float *w = of->wi + k * n, *mu = of->mean ? of->mean + k * n : NULL, *s = of->scale + k * n;
    float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        const float u = s[i] > 0 ? w[i] / s[i] : 0.0f;
        sum += u * u;
    }
    if (mu)
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < n; i++) along += mu[i] * w[i];
    const float u0 = of->bias && of->bias[k] > 0 ? (of->w0[k] + along) / of->bias[k] : 0.0f;
    return sum + u0 * u0;
}

/* The share of units that take part in a step (proportions.share), given their squared lengths and that of a unit half as
 * long as usual. */
static double share(int64_t units, const float *lengths, double half) {
    double sum = 0;
    for (int64_t i = 0; i < units; i++) {
        const double part = lengths[i] / half;
        sum += part < 1 ? part : 1; /* 1 where it is NaN */
    }
    return sum / units;
}

/* Measures all layers; `half` is proportions.HALF. Returns 0 if memory runs out. */
int qd_lengths(int64_t count, measured *layers, double half, int threads) {
    int64_t units = 0, numbers = 0;
    for (int64_t k = 0; k < count; units += layers[k].units, k++) numbers += layers[k].units * layers[k].n;
    room *mine = borrow(units);
    if (!mine) return 0;
#pragma omp parallel num_threads(worth(numbers, threads))
    {
        const unsigned before = flush_denormals();
        float *lengths = mine->numbers;
        for (const measured *of = layers; of < layers + count; lengths += of->units, of++)
#pragma omp for schedule(static) nowait
            for (int64_t k = 0; k < of->units; k++) lengths[k] = squared(of, k);
        restore(before);
    }
    float *lengths = mine->numbers;
    for (measured *of = layers; of < layers + count; lengths += of->units, of++) {
        const double usual = mean(of->units, lengths);
        of->total = usual * of->units;
        of->share = share(of->units, lengths, half * usual);
    }
    give_back(mine);
    return 1;
}

/* out <- (scale delta)^2, or out + (scale delta)^2 if `add`; squares below `smallest` count as 0 (moments.square). */
void qd_square(int64_t n, const float *delta, float scale, float smallest, int add, float *out,
               int threads) {
#pragma omp parallel num_threads(worth(n, threads))
    {
        const unsigned before = flush_denormals();
#pragma omp for simd schedule(static)
        for (int64_t i = 0; i < n; i++) {
            const float d = scale * delta[i], w = d * d, kept = w < smallest ? 0.0f : w;
            out[i] = add ? out[i] + kept : kept;
        }
        restore(before);
    }
}

/* w <- w slope^2, or 0 if that is below `smallest`. */
void qd_weaken(int64_t n, const float *slope, float smallest, float *w, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(worth(n, threads))
    for (int64_t i = 0; i < n; i++) {
        const float x = w[i] * (slope[i] * slope[i]);
        w[i] = x < smallest ? 0.0f : x;
    }
}

/* centred <- a - shift and squared <- (a - shift)^2, row by row; if `centred` is NULL, only squared <- a^2. */
void qd_centre(int64_t rows, int64_t n, const float *a, const float *shift, float *centred,
               float *squared, int threads) {
#pragma omp parallel for schedule(static) num_threads(worth(rows * n, threads))
    for (int64_t k = 0; k < rows; k++) {
        const float *in = a + k * n;
        float *sq = squared + k * n;
        if (centred) {
            float *c = centred + k * n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) {
                const float x = in[i] - shift[i];
                c[i] = x;
                sq[i] = x * x;
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) sq[i] = in[i] * in[i];
        }
    }
}

/* Whether all numbers x of all arrays are finite, or (scale x)^2 in an array whose scale is not 0. */
int qd_finite(int64_t count, const int64_t *sizes, const float *const *arrays, const float *scales,
              int threads) {
    float sum = 0;
#pragma omp parallel reduction(+ : sum) num_threads(worth(total(count, sizes), threads))
    for (int64_t k = 0; k < count; k++) {
        const float *x = arrays[k], scale = scales[k];
        const int64_t first = sizes[k] * thread() / team(), last = sizes[k] * (thread() + 1) / team();
        if (scale == 0) {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = first; i < last; i++) sum += 0 * x[i]; /* 0 if finite, else NaN */
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = first; i < last; i++) sum += 0 * ((scale * x[i]) * (scale * x[i]));
        }
    }
    return sum == 0;
}

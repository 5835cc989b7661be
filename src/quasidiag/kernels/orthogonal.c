/* The orthogonal factor P Q^T of matrices P S Q^T (quasidiag.auto.orthogonal).
 *
 * From the Gram matrix G = X X^T and the inverses of it with shifts (by_poles is the oracle):
 *
 *     P Q^T = (r + sum_j r_j (G + s_j)^{-1}) X.
 *
 * The inverses and products are our own, to save what a library would do: compute both halves of a symmetric matrix, and
 * make a call for each of many small matrices. Every number is summed in the same order on any number of threads.
 *
 * A processor that multiplies bfloat16 faster gets both factors of the products rounded to it, in pairs: a word holds the
 * numbers of a column in two rows that follow each other. (Whole tiles of words are for tiles.c.) Sums and inverses are of
 * floats all the same.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "orthogonal.h"

/* The pivots of G + s are at least s. If one is less than this part of s, rounding has spoilt the matrix. */
static const float HALF = 0.5f;

typedef float vector __attribute__((vector_size(4 * LANES)));

/* c <- x^T y, or c + x^T y if `more`; x and y have `k` rows. Not inlined, or the compiler may run out of registers. */
__attribute__((noinline)) static void multiply(int64_t k, const float *x, int64_t xs, const float *y, int64_t ys,
                                               int more, float *c, int64_t cs) {
    vector sum[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < 2; h++) sum[i][h] = more ? *(vector *)(c + i * cs + h * LANES) : (vector){0};
#pragma GCC unroll 4
    for (int64_t s = 0; s < k; s++, x += xs, y += ys) {
        const vector left = *(const vector *)y, right = *(const vector *)(y + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            sum[i][0] += x[i] * left;
            sum[i][1] += x[i] * right;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < 2; h++) *(vector *)(c + i * cs + h * LANES) = sum[i][h];
}

#ifdef BF16
#include "words.h"

static int paired_up(void) { return __builtin_cpu_supports("avx512bf16") != 0; }

static int amd(void) { return __builtin_cpu_is("amd") != 0; }

/* As `multiply`, of `k` rows of pairs. */
__attribute__((noinline)) BFLOAT16 static void multiply_pairs(int64_t k, const float *x, int64_t xs,
                                                                            const float *y, int64_t ys, int more,
                                                                            float *c, int64_t cs) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < 2; h++) sum[i][h] = more ? _mm512_load_ps(c + i * cs + h * LANES) : _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t s = 0; s < k; s++, x += xs, y += ys) {
        const __m512bh left = (__m512bh)_mm512_load_ps(y), right = (__m512bh)_mm512_load_ps(y + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const __m512bh both = (__m512bh)_mm512_set1_ps(x[i]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, left);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, right);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < 2; h++) _mm512_store_ps(c + i * cs + h * LANES, sum[i][h]);
}

/* The pairs of two rows, of WIDTH columns. They may take the place of a row. */
BFLOAT16 static void pair(float *to, const float *first, const float *second) {
    for (int64_t j = 0; j < WIDTH; j += LANES)
        _mm512_store_si512(to + j, paired(_mm512_load_ps(first + j), _mm512_load_ps(second + j)));
}

/* As `take_lines`, where the numbers of a pair lie next to each other (row = 1). */
static void take_pairs(float *to, int64_t stride, const float *from, int64_t column, int64_t rows, int64_t there,
                       float by) {
    float square[LANES][LANES] __attribute__((aligned(64)));
    for (int64_t first = 0; first < rows; first += 2 * LANES, from += 2 * LANES, to += LANES * stride)
        for (int64_t left = 0; left < WIDTH; left += LANES) {
            for (int64_t j = 0; j < LANES; j++)
                join(square[j], from + (left + j) * column, left + j < there ? rows - first : 0, by);
            transpose(square[0]);
            for (int64_t r = 0; r < least(LANES, parts(rows - first, 2)); r++)
                memcpy(to + r * stride + left, square[r], sizeof square[r]);
        }
}
#else
static int paired_up(void) { return 0; }
static int amd(void) { return 0; }
static void multiply_pairs(int64_t k, const float *x, int64_t xs, const float *y, int64_t ys, int more, float *c,
                           int64_t cs) {}
static void pair(float *to, const float *first, const float *second) {}
static void take_pairs(float *to, int64_t stride, const float *from, int64_t column, int64_t rows, int64_t there,
                       float by) {}
#endif

int qd_multiplies(int factors) { return factors == TILES ? tiled() : factors == PAIRS ? paired_up() : 1; }

int qd_fastest(void) { return tiled() ? TILES : paired_up() && amd() ? PAIRS : FLOATS; }

/* c <- x^T y as by `multiply`, of numbers or of pairs. */
static void multiply_lines(const problem *m, int64_t k, const float *x, const float *y, int64_t ys, int more, float *c) {
    (m->factors == PAIRS ? multiply_pairs : multiply)(k, x, m->stride, y, ys, more, c, WIDTH);
}

/* How many rows of numbers, or of pairs, hold `rows` rows. */
static int64_t lines(const problem *m, int64_t rows) { return m->factors == PAIRS ? parts(rows, 2) : rows; }

/* G <- X X^T of every matrix, from X^T; only the tiles on the diagonal and above. Up to DEPTH columns (or pairs) at a time are
 * summed separately: else the rounding errors of many columns that are alike could exceed the smallest shift. */
static void square(const problem *m) {
    const int64_t stride = m->stride, n = lines(m, m->n), depth = parts(n, parts(n, DEPTH));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        const int64_t which = i % m->count, column = (m->panels - 1 - i / m->count) * WIDTH; /* long ones first */
        const float *x = m->packed + which * n * stride;
        float tile[ROWS * WIDTH] __attribute__((aligned(64)));
        for (int64_t s = 0; s < n; s += depth)
            for (int64_t row = 0; row < least(m->side, column + WIDTH); row += ROWS) {
                float *c = m->gram + which * m->size + row * stride + column;
                multiply_lines(m, least(depth, n - s), x + s * stride + row, x + s * stride + column, stride, 0, tile);
                for (int64_t r = 0; r < ROWS; r++)
#pragma omp simd
                    for (int64_t j = 0; j < WIDTH; j++) c[r * stride + j] = tile[r * WIDTH + j] + (s ? c[r * stride + j] : 0);
            }
    }
}

/* A bound on the eigenvalues of G, its Frobenius norm; and -(G/bound + s) for every shift s. */
static void shift(const problem *m, const rational *r) {
#pragma omp for schedule(static)
    for (int64_t which = 0; which < m->count; which++) {
        double sum = 0;
        for (int64_t i = 0; i < m->g; i++) {
            const float *g = m->gram + which * m->size + i * m->stride;
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t j = i + 1; j < m->g; j++) part += g[j] * g[j];
            sum += 2 * part + g[i] * g[i];
        }
        const float bound = (float)sqrt(sum);
        m->bound[which] = bound < 1 ? 1 : bound; /* it is less only if X is zero: else its largest entry is 1 */
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->poles * m->side; i++) {
        const int64_t at = i / m->side, row = i % m->side, which = at / m->poles;
        const float *g = m->gram + which * m->size + row * m->stride, by = 1 / m->bound[which];
        float *to = m->shifted + at * m->size + row * m->stride;
#pragma omp simd
        for (int64_t j = row; j < m->panels * WIDTH; j++) to[j] = -by * g[j];
        to[row] -= r->shifts[at % m->poles];
    }
}

/* The lower factor l of -p = L L^T, of BLOCK rows, with its diagonal inverted. Returns 0 if a pivot is less than HALF times
 * the shift, by rounding. */
static int factorise(const float p[BLOCK][BLOCK], float l[BLOCK][BLOCK], float shift) {
    float left[BLOCK][BLOCK] __attribute__((aligned(64)));
    for (int i = 0; i < BLOCK; i++)
        for (int j = 0; j < BLOCK; j++) left[i][j] = -p[i][j];
    for (int k = 0; k < BLOCK; k++) {
        if (!(left[k][k] > HALF * shift)) return 0;
        const float by = 1 / sqrtf(left[k][k]);
        for (int j = 0; j < BLOCK; j++) l[j][k] = left[k][j] *= by;
        for (int i = k + 1; i < BLOCK; i++)
            for (int j = 0; j < BLOCK; j++) left[i][j] -= left[k][i] * left[k][j];
        l[k][k] = by;
    }
    return 1;
}

/* w <- L^{-1} b (in the place of b) and z <- L^{-T} w, for LANES columns whose rows lie `stride` apart. */
static void substitute(const float l[BLOCK][BLOCK], float *b, float *z, int64_t stride) {
    vector x[BLOCK];
#pragma GCC unroll 16
    for (int s = 0; s < BLOCK; s++) x[s] = *(vector *)(b + s * stride);
#pragma GCC unroll 16
    for (int s = 0; s < BLOCK; s++) {
        x[s] *= l[s][s];
        *(vector *)(b + s * stride) = x[s];
#pragma GCC unroll 16
        for (int t = s + 1; t < BLOCK; t++) x[t] -= l[t][s] * x[s];
    }
#pragma GCC unroll 16
    for (int s = BLOCK - 1; s >= 0; s--) {
        x[s] *= l[s][s];
        *(vector *)(z + s * stride) = x[s];
#pragma GCC unroll 16
        for (int t = 0; t < s; t++) x[t] -= l[s][t] * x[s];
    }
}

/* Prepares the sweep of BLOCK rows B of a matrix -S. With P = L L^T the square of S on the diagonal in these rows, writes
 * W = L^{-1} B into `rows` and behind it L^{-T} W = P^{-1} B, with P^{-1} itself in the columns of the square. Returns 0 if
 * rounding has left no such L. */
static int gather(const problem *m, const float *a, float *rows, int64_t k, float shift) {
    const int64_t stride = m->stride, width = m->panels * WIDTH, few = least(BLOCK, m->side - k);
    float p[BLOCK][BLOCK] __attribute__((aligned(64))), l[BLOCK][BLOCK] __attribute__((aligned(64)));
    for (int64_t j = 0; j < k; j++)
        for (int64_t s = 0; s < few; s++) rows[s * stride + j] = a[j * stride + k + s];
    for (int64_t s = 0; s < few; s++)
        for (int64_t j = k; j < width; j++) rows[s * stride + j] = a[(k + s) * stride + j];
    for (int64_t s = few; s < BLOCK; s++) memset(rows + s * stride, 0, width * sizeof(float));
    for (int64_t s = 0; s < BLOCK; s++)
        for (int64_t j = s; j < BLOCK; j++) p[s][j] = p[j][s] = j < few ? rows[s * stride + k + j] : -(float)(s == j);
    for (int64_t s = 0; s < few; s++)
        for (int64_t j = 0; j < few; j++) rows[s * stride + k + j] = s == j;
    if (!factorise(p, l, shift)) return 0;
    for (int64_t j = 0; j < width; j += LANES) substitute(l, rows + j, rows + BLOCK * stride + j, stride);
    return 1;
}

/* Sweeps BLOCK rows from `k` on in one panel of columns of -S: -S + W^T W, but P^{-1} B in these rows and columns. (W^T W
 * in place of B^T P^{-1} B, because P^{-1} may be large, and rounding errors with it.) */
static void follow(const problem *m, float *a, const float *rows, int64_t k, int64_t column) {
    const int64_t stride = m->stride, few = least(BLOCK, m->side - k), last = least(m->side, column + WIDTH);
    const float *swept = rows + BLOCK * stride;
    for (int64_t row = 0; row < last; row += ROWS)
        multiply(BLOCK, rows + row, stride, rows + column, stride, 1, a + row * stride + column, stride);
    for (int64_t s = 0; s < few && k < last; s++)
        memcpy(a + (k + s) * stride + column, swept + s * stride + column, WIDTH * sizeof(float));
    for (int64_t j = 0; j < k && column <= k && k < last; j++)
        for (int64_t s = 0; s < few; s++) a[j * stride + k + s] = swept[s * stride + j];
}

/* Every -S <- S^{-1}, by sweeping one block of rows after the other. An S that rounding has made indefinite is left out of
 * the sum: weak directions of X are then strengthened less. */
static void invert(const problem *m, const rational *r) {
    const int64_t all = m->count * m->poles, room_for = 2 * BLOCK * m->stride;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < all; i++) m->counts[i] = r->parts[i % m->poles];
    for (int64_t k = 0; k < m->side; k += BLOCK) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all; i++)
            if (m->counts[i] != 0 &&
                !gather(m, m->shifted + i * m->size, m->rows + i * room_for, k, r->shifts[i % m->poles]))
                m->counts[i] = 0;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all * m->panels; i++) {
            const int64_t at = i / m->panels, column = i % m->panels * WIDTH;
            if (m->counts[at] != 0) follow(m, m->shifted + at * m->size, m->rows + at * room_for, k, column);
        }
    }
}

/* Writes the sum that X is to be multiplied by, over the root of the bound, into the place of G, both halves: square by
 * square, each also transposed. */
static void combine(const problem *m, const rational *r) {
    const int64_t stride = m->stride, squares = parts(m->side, LINE);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < m->count * squares; at++) {
        const int64_t which = at / squares, top = at % squares * LINE, bottom = least(top + LINE, m->side);
        const float *from = m->shifted + which * m->poles * m->size, *counts = m->counts + which * m->poles;
        const float by = 1 / sqrtf(m->bound[which]);
        float *to = m->gram + which * m->size;
        for (int64_t left = top; left < m->side; left += LINE)
            for (int64_t i = top; i < bottom; i++) {
                float sum[LINE] = {0};
                for (int64_t pole = 0; pole < m->poles; pole++)
                    for (int64_t j = 0; counts[pole] != 0 && j < LINE; j++)
                        sum[j] += counts[pole] * from[pole * m->size + i * stride + left + j];
                if (left == top) sum[i - top] += r->whole;
                for (int64_t j = left == top ? i - top : 0; j < LINE; j++) {
                    to[i * stride + left + j] = by * sum[j];
                    if (left + j < m->side) to[(left + j) * stride + i] = by * sum[j];
                }
            }
    }
}

/* Copies a panel of `rows` rows, `stride` apart: `by` times the columns that are `there`, then zeros up to WIDTH. Numbers of
 * `from` lie next to each other along its rows (column = 1) or along its columns. */
static void take(float *to, int64_t stride, const float *from, int64_t row, int64_t column, int64_t rows,
                 int64_t there, float by) {
    if (column == 1)
        for (int64_t r = 0; r < rows; r++, to += stride, from += row) {
#pragma omp simd
            for (int64_t j = 0; j < there; j++) to[j] = by * from[j];
            for (int64_t j = there; j < WIDTH; j++) to[j] = 0;
        }
    else
        for (int64_t first = 0; first < rows; first += LINE, to += LINE * stride, from += LINE) {
            const int64_t few = least(LINE, rows - first);
            for (int64_t j = 0; j < WIDTH; j++)
                for (int64_t r = 0; r < few; r++) to[r * stride + j] = j < there ? by * from[r + j * column] : 0;
        }
}

/* As `take`, of what is to be multiplied: in pairs, if `m` has it so. */
static void take_lines(const problem *m, float *to, int64_t stride, const float *from, int64_t row, int64_t column,
                       int64_t rows, int64_t there, float by) {
    if (m->factors == FLOATS) {
        take(to, stride, from, row, column, rows, there, by);
        return;
    }
    if (row == 1) {
        take_pairs(to, stride, from, column, rows, there, by);
        return;
    }
    float few[LINE][WIDTH] __attribute__((aligned(64)));
    for (int64_t first = 0; first < rows; first += LINE, from += LINE * row) {
        const int64_t some = least(LINE, rows - first);
        if (some % 2) memset(few[some], 0, sizeof few[some]);
        take(few[0], WIDTH, from, row, column, some, there, by);
        for (int64_t r = 0; r < some; r += 2, to += stride) pair(to, few[r], few[r + 1]);
    }
}

float scale(const problem *m, int64_t which) {
    float most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = which * m->units; i < (which + 1) * m->units; i++) most = m->most[i] > most ? m->most[i] : most;
    return most > 0 ? 1 / fminf(most, 8e37f) : 0; /* the inverse of more would be denormal, and flushed */
}

/* Packs X^T, scaled, panel by panel. */
static void pack(const problem *m) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        const int64_t which = i / m->panels, first = i % m->panels * WIDTH;
        take_lines(m, m->packed + which * lines(m, m->n) * m->stride + first, m->stride,
                   m->x + which * m->g * m->n + first * m->row, m->column, m->row, m->n, least(WIDTH, m->g - first),
                   scale(m, which));
    }
}

/* Brings the sum in the place of G into pairs. */
static void couple(const problem *m) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        float *sum = m->gram + i / m->panels * m->size + i % m->panels * WIDTH;
        for (int64_t s = 0; s < lines(m, m->side); s++)
            pair(sum + s * m->stride, sum + 2 * s * m->stride, sum + (2 * s + 1) * m->stride);
    }
}

void put(const problem *m, float *x, float (*block)[WIDTH], int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++, x += m->row)
        if (m->column == 1)
            memcpy(x, block[r], columns * sizeof(float));
        else
            for (int64_t j = 0; j < columns; j++) x[j * m->column] = block[r][j];
}

/* X <- (the sum in the place of G) X. */
static void finish(const problem *m) {
    const int64_t panels = parts(m->n, WIDTH), g = lines(m, m->g), depth = parts(g, parts(g, DEPTH));
    const int64_t each = m->factors == PAIRS ? 2 : 1;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * panels; i++) {
        const int64_t which = i / panels, first = i % panels * WIDTH, there = least(WIDTH, m->n - first);
        const int64_t at = which * m->g * m->n + first * m->column;
        float *x = m->x + at;
        const float by = scale(m, which);
        float result[parts(m->g, ROWS) * ROWS][WIDTH] __attribute__((aligned(64)));
        float panel[DEPTH * WIDTH] __attribute__((aligned(64)));
        for (int64_t s = 0; s < g; s += depth) {
            take_lines(m, panel, WIDTH, x + each * s * m->row, m->row, m->column, least(each * depth, m->g - each * s),
                       there, by);
            for (int64_t row = 0; row < m->g; row += ROWS)
                multiply_lines(m, least(depth, g - s), m->gram + which * m->size + s * m->stride + row, panel, WIDTH, s > 0,
                               result[row]);
        }
        put(m, x, result, m->g, there);
    }
}

/* The sizes for matrices of g rows and n columns, which lie `row` and `column` apart. */
problem plan(int64_t g, int64_t n, int64_t row, int64_t column, int64_t poles, int factors) {
    problem m = {.poles = poles, .g = g, .n = n, .row = row, .column = column, .panels = parts(g, WIDTH)};
    m.factors = g < FEW ? FLOATS : factors;
    m.side = parts(g, ROWS) * ROWS;
    m.stride = (m.panels * WIDTH / LINE | 1) * LINE;
    m.size = m.side * m.stride;
    m.room = m.factors == TILES ? words_of_tiles(g, n) : n * m.stride;
    m.each = m.room + (1 + poles) * m.size + 2 * poles * BLOCK * m.stride;
    m.each += parts(1 + poles, LINE) * LINE;
    return m;
}

/* X <- P Q^T of every matrix. All threads of a team call it together. */
void orthogonalise(problem m, const rational *r) {
    m.gram = m.packed + m.count * m.room;
    m.shifted = m.gram + m.count * m.size;
    m.rows = m.shifted + m.count * m.poles * m.size;
    m.bound = m.rows + 2 * m.count * m.poles * BLOCK * m.stride;
    m.counts = m.bound + m.count;
    const int tiles = m.factors == TILES;
    (tiles ? pack_tiles : pack)(&m);
    (tiles ? square_tiles : square)(&m);
    shift(&m, r);
    invert(&m, r);
    combine(&m, r);
    if (m.factors != FLOATS) (tiles ? couple_tiles : couple)(&m);
    (tiles ? finish_tiles : finish)(&m);
}
